"""Log of a made-up run: the lines that vjob's agent would have kept of a program's output.

A program writes and waits; each of its streams goes through the agent's own splitter, so a progress
bar is one state every few seconds, as in the log of a node. Time is simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from varuna_core.agent.processes.output import LineSplitter

START = datetime(2026, 3, 2, 9, 0, 0, tzinfo=timezone.utc)
"""Time at which a program writes its first line."""
TICK_S = 0.25


@dataclass(frozen=True)
class Line:
    """A line as the node's log has it, without the rank's tag."""

    kind: str
    """out or err"""
    rank: int
    text: str
    at_s: float
    """Seconds since the start."""


class Log:
    """Output of one program, with the random numbers and the clock that made it."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.lines: list[Line] = []
        self.now_s = 0.0
        self._splitters: dict[tuple[str, int], LineSplitter] = {}
        self._high = self.random.uniform(5.0, 9.0)
        self._low = self.random.uniform(1.2, 2.8)

    def out(self, text: str = "", rank: int = 0) -> None:
        """Print lines to standard output."""
        self.write(text + "\n", "out", rank)

    def err(self, text: str = "", rank: int = 0) -> None:
        """Print lines to standard error."""
        self.write(text + "\n", "err", rank)

    def bar(self, text: str, kind: str = "err", rank: int = 0) -> None:
        """Draw a progress bar over its last state."""
        self.write("\r" + text, kind, rank)

    def lower_bar(self, text: str, kind: str = "err", rank: int = 0) -> None:
        """Draw a bar on the line below the current one and go back up, as tqdm does."""
        self.write(f"\n\r{text}\x1b[A", kind, rank)

    def write(self, text: str, kind: str = "out", rank: int = 0) -> None:
        splitter = self._splitters.setdefault((kind, rank), LineSplitter())
        for line in splitter.feed(text.encode(), self.now_s):
            self._keep(kind, rank, line)

    def wait(self, seconds: float) -> None:
        """Let time pass, in which the agent shows lines that have no end."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + TICK_S)
            for (kind, rank), splitter in self._splitters.items():
                line = splitter.due(self.now_s)
                if line is not None:
                    self._keep(kind, rank, line)

    def close(self) -> None:
        """Keep what is still without an end."""
        for (kind, rank), splitter in self._splitters.items():
            line = splitter.flush()
            if line is not None:
                self._keep(kind, rank, line)

    def steps(
        self, last: int, every: int = 1, first: int = 0, step_s: float = 0.5
    ) -> Iterator[int]:
        """Steps from `first` to `last` that the program prints, and the time that they take."""
        for step in range(first, last + 1, every):
            yield step
            self.wait(step_s * every * self.random.uniform(0.9, 1.15))

    def pick(self, low: int, high: int, every: int = 1) -> int:
        """A multiple of `every` between the two."""
        return self.random.randrange(low, high + 1, every)

    def near(self, value: float, spread: float = 0.05) -> float:
        return value * self.random.uniform(1 - spread, 1 + spread)

    def loss(self, share: float, digits: int = 4) -> float:
        """A loss that falls with the share of the training that is done, as it is printed."""
        mean = self._low + (self._high - self._low) * math.exp(-5 * share)
        return round(mean * self.random.uniform(0.97, 1.03), digits)

    def clock(self, layout: str = "%Y-%m-%d %H:%M:%S") -> str:
        """The time of day, as a logger writes it."""
        return (START + timedelta(seconds=self.now_s)).strftime(layout)

    def stamp(self) -> str:
        """The same with milliseconds, as Python's logging has it: 2026-03-02 09:00:00,512."""
        return self.clock("%Y-%m-%d %H:%M:%S,%f")[:-3]

    def _keep(self, kind: str, rank: int, line: bytes) -> None:
        self.lines.append(Line(kind, rank, line.decode(), self.now_s))


def render_clock(seconds: float) -> str:
    """Minutes and seconds as tqdm writes them: 03:20, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def render_tqdm(
    done: int,
    total: int,
    took_s: float,
    name: str = "",
    unit: str = "it",
    more: str = "",
    inverts: bool = True,
    first: int = 0,
) -> str:
    """A state of tqdm's bar without a terminal: 2.00s/it if `inverts`, begun at `first`."""
    share = done / total
    blocks = int(share * 10 * 8)
    part = "▏▎▍▌▋▊▉"[blocks % 8 - 1] if blocks % 8 else ""
    bar = ("█" * (blocks // 8) + part).ljust(10)
    left = rate = "?"
    if done > first and took_s:
        pace = (done - first) / took_s
        left = render_clock((total - done) / pace)
        rate = f"{pace:5.2f}{unit}/s" if pace >= 1 or not inverts else f"{1 / pace:5.2f}s/{unit}"
    else:
        rate = f"?{unit}/s"
    tail = f", {more}" if more else ""
    head = f"{name}: " if name else ""
    times = f"{render_clock(took_s)}<{left}"
    return f"{head}{share * 100:3.0f}%|{bar}| {done}/{total} [{times}, {rate}{tail}]"


def render_span(seconds: float) -> str:
    """A timedelta of whole seconds: 1:02:03."""
    return str(timedelta(seconds=int(seconds)))

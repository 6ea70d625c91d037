"""Merge lines of many logs into one stream ordered by time, with equal lines of ranks only once.

    n060 | 0: loading     100.2                     x4 ranks 0-3 | loading
    n060 | 1: loading     100.2   ─► by time ─►     n061 err | 3: slow disk
    n061 | 2: loading     100.3      held 2 s
    n061 err | 3: slow disk 100.9
    n061 | 3: loading     101.0

Times are those of <node>.times, converted to the file server's clock; if there are none, those with
which the lines themselves begin. Files without times follow each other.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from varuna_core.records.formatting import join_numbers
from varuna_core.records.logs.tail import READ_BYTES, SKIP_BYTES, Follower
from varuna_core.records.logs.times import MarkReader

HOLD_S = 2.0
"""Seconds after the first line of a group during which equal lines still join the group."""
ALL_LINES = 1 << 40
MOST_HELD = 1000
"""Most lines that are held; this is the only bound for lines without times."""
Paint = Callable[[str, int | None], str]
"""Function that colours a text for a rank."""
_TAG = re.compile(r"(\d{1,9}): (.*)", re.DOTALL)


def keep_plain(text: str, rank: int | None) -> str:
    """Return the text without colour."""
    return text


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line and its origin."""

    at: float | None
    label: str
    """The node's name, or `rank 3`."""
    is_err: bool
    rank: int | None
    text: str
    """The line's text without the rank's tag."""

    def render(self, paint: Paint = keep_plain) -> str:
        is_tagged = self.rank is not None and self.label != f"rank {self.rank}"
        tag = f"{self.rank}: " if is_tagged else ""
        return paint(f"{self.label}{' err' * self.is_err} | {tag}", self.rank) + self.text


@dataclass(kw_only=True)
class EqualLines:
    """Equal lines of different ranks, or a single line that no other rank printed."""

    first: LogLine
    ranks: set[int] = field(default_factory=set)

    def render(self, world: int | None = None, paint: Paint = keep_plain) -> str:
        if len(self.ranks) < 2:
            return self.first.render(paint)
        who = "all ranks" if len(self.ranks) == world else f"ranks {join_numbers(self.ranks)}"
        head = f"x{len(self.ranks)} {who}{' err' * self.first.is_err} | "
        return paint(head, None) + self.first.text


class Log:
    """A growing log whose lines have times, ranks and a label."""

    def __init__(
        self,
        path: Path,
        label: str,
        *,
        rank: int | None = None,
        num_lines: int | None = None,
        within_bytes: int = SKIP_BYTES,
        clock_offset_s: float = 0.0,
        read_bytes: int = READ_BYTES,
        only: int | None = None,
        is_err: bool | None = None,
    ) -> None:
        """`rank` is the rank if the log is that of a single rank, `only` selects one rank's lines
        in a node's log; of present lines only the last `num_lines` are read."""
        self.path, self.label, self.rank, self._only = path, label, rank, only
        self._num_last = None if only is None else num_lines
        self._follower = Follower(
            path,
            start_lines=num_lines if self._num_last is None else ALL_LINES,
            within_bytes=within_bytes,
            read_bytes=read_bytes,
        )
        self.is_err = path.suffix == ".err" if is_err is None else is_err
        self._marks = MarkReader(path.with_suffix(".times"), is_err=self.is_err)
        self._clock_offset_s = clock_offset_s

    def read(self, *, final: bool = False) -> Iterator[LogLine]:
        """Yield the lines that were added since the last read."""
        lines = self._read(final=final)
        if self._only is not None:
            lines = (line for line in lines if line.rank == self._only)
        if self._num_last is not None:
            lines = iter(deque(lines, maxlen=self._num_last))
            self._num_last = None
        return lines

    def _read(self, *, final: bool) -> Iterator[LogLine]:
        self._marks.look()
        for place, line in self._follower.read_placed(final=final):
            at = self._marks.find_exact(place)[0] if self.rank is None else None
            rank, text = (self.rank, line) if self.rank is not None else split_tag(line)
            yield LogLine(
                at=None if at is None else at + self._clock_offset_s,
                label=self.label,
                is_err=self.is_err,
                rank=rank,
                text=text,
            )


def split_tag(line: str) -> tuple[int | None, str]:
    """Split `3: text` into rank 3 and `text`; the rank is None without a tag."""
    found = _TAG.fullmatch(line)
    return (int(found.group(1)), found.group(2)) if found else (None, line)


def merge_lines(streams: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Merge streams by time, keeping the order within each."""
    return heapq.merge(*(_rising(stream) for stream in streams), key=_time_of)


def _time_of(line: LogLine) -> float:
    return float("-inf") if line.at is None else line.at


def _rising(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Yield lines with times that never decrease within the file."""
    latest: float | None = None
    for line in lines:
        if line.at is None or (latest is not None and line.at < latest):
            line = replace(line, at=latest)
        latest = line.at
        yield line


class Collapser:
    """Buffer that holds lines for a while, so that equal lines of other ranks can join them."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._held: dict[int, EqualLines] = {}
        """Held groups, keyed by number, in the order of their first lines."""
        self._open: dict[tuple[bool, str], list[int]] = {}
        """Numbers of the held groups, keyed by stream (True for standard error) and text."""
        self._next = 0

    def add(self, line: LogLine) -> None:
        """Add a line; lines must come in order of time."""
        ranks = set() if line.rank is None else {line.rank}
        numbers = self._open.setdefault(_key_of(line), [])
        for number in numbers:
            held = self._held[number].ranks
            if ranks and held and not ranks & held:
                held |= ranks
                return
        self._held[self._next] = EqualLines(first=line, ranks=ranks)
        numbers.append(self._next)
        self._next += 1

    def take(self, now: float | None) -> Iterator[EqualLines]:
        """Yield the groups that no further line can join at `now`, oldest first."""
        while self._held:
            number, group = next(iter(self._held.items()))
            at = group.first.at
            is_young = at is None or now is None or now - at <= self._hold_s
            if is_young and number >= self._next - MOST_HELD:
                return
            yield self._release(number)

    def take_all(self) -> Iterator[EqualLines]:
        while self._held:
            yield self._release(next(iter(self._held)))

    def _release(self, number: int) -> EqualLines:
        group = self._held.pop(number)
        key = _key_of(group.first)
        self._open[key].remove(number)
        if not self._open[key]:
            del self._open[key]
        return group


def _key_of(line: LogLine) -> tuple[bool, str]:
    return line.is_err, line.text


def collapse(lines: Iterable[LogLine], hold_s: float = HOLD_S) -> Iterator[EqualLines]:
    """Group equal lines of different ranks; yield groups in the order of their first lines."""
    collapser = Collapser(hold_s)
    for line in lines:
        yield from collapser.take(line.at)
        collapser.add(line)
    yield from collapser.take_all()

"""Run folders with everything a job can leave, and a count of it that uses nothing of vjob."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.reports.traces import MS, ORIGIN, Event, write_rank

KINDS = ("F", "B", "I", "W", "R", "send", "all-reduce", "optimizer", "data", "checkpoint", "other")
BEGAN_S = ORIGIN // 10**9


@dataclass(frozen=True, kw_only=True)
class MadeRank:
    """What a rank did: (kind, step, micro-batch, wait, work, bytes, what) one after the other."""

    stage: int
    shift_ns: int
    events: tuple[tuple[str, int, int, int, int, int, str], ...]


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """Attempts of ranks, and what their logs and samples say."""

    attempts: tuple[tuple[MadeRank, ...], ...]
    lines: tuple[str, ...]
    """Of rank 0 in the last attempt."""
    losses: tuple[float, ...]
    temperatures: tuple[float, ...]
    is_over: bool


EVENTS = st.tuples(
    st.sampled_from(KINDS),
    st.integers(1, 4),
    st.integers(-1, 3),
    st.integers(0, 10**7),
    st.integers(0, 10**10),
    st.sampled_from([0, 1, 4096, 10**9]),
    st.sampled_from(["", "gradients", "<b>", "a b"]),
)
RANKS = st.builds(
    lambda stage, shift, events: MadeRank(
        stage=stage, shift_ns=shift, events=tuple(sorted(events, key=lambda one: one[1]))
    ),
    st.integers(0, 2),
    st.sampled_from([0, 3, -70_001, 10**9]),
    st.lists(EVENTS, min_size=1, max_size=8),
)
LINES = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=30
).filter(lambda text: text.strip() != "" and not text[0].isdigit() and text[0] not in "[ \t")
RUNS = st.builds(
    lambda attempts, lines, losses, temperatures, is_over: MadeRun(
        attempts=tuple(tuple(ranks) for ranks in attempts),
        lines=tuple(lines),
        losses=tuple(losses),
        temperatures=tuple(temperatures),
        is_over=is_over,
    ),
    st.lists(st.lists(RANKS, max_size=3), max_size=3),
    st.lists(LINES, max_size=5),
    st.lists(st.floats(0.1, 9.0).map(lambda loss: round(loss, 3)), max_size=4),
    st.lists(st.floats(20, 99).map(lambda one: round(one, 1)), max_size=4),
    st.booleans(),
)


def write_run(folder: Path, made: MadeRun) -> None:
    """A run folder; of one that is not over the traces end in a torn line and the exits lack."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    happened = [{"time": BEGAN_S - 5.5, "kind": "submitted", "jobs": ["7"]}]
    for number, ranks in enumerate(made.attempts):
        attempt = folder / f"attempt-{number}"
        attempt.mkdir()
        happened.append({"time": BEGAN_S + number, "kind": "started", "attempt": number})
        for rank, own in enumerate(ranks):
            path = write_rank(
                attempt, rank, list_events(own), stage=own.stage, shift_ns=own.shift_ns,
                host=f"n{rank % 2}",
            )  # fmt: skip
            if not made.is_over:
                with path.open("a") as handle:
                    handle.write('["F", 4, 0, 0, 12')
        if made.is_over or number + 1 < len(made.attempts):
            (attempt / "exit").mkdir()
            for rank in range(len(ranks)):
                value = {
                    "rank": rank, "node": f"n{rank % 2}", "code": 0, "signal": None,
                    "stopped": False, "started": BEGAN_S + 0.25, "ended": BEGAN_S + 9.5,
                    "last_error": "",
                }  # fmt: skip
                (attempt / "exit" / f"{rank}.json").write_text(json.dumps(value))
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in happened))
    if made.attempts:
        write_logs(folder / f"attempt-{len(made.attempts) - 1}", made)


def list_events(own: MadeRank) -> list[Event]:
    now, found = 0, []
    for kind, step, micro, wait, work, size, what in own.events:
        found.append((kind, step, own.stage, micro, now, wait, work, size, what))
        now += wait + work + MS
    return found


def write_logs(attempt: Path, made: MadeRun) -> None:
    texts = [f"0: {line}" for line in made.lines]
    texts += [
        f" iteration {step:8d}/{len(made.losses):8d} | elapsed time per iteration (ms): 12.0 | "
        f"lm loss: {loss:.6E} |"
        for step, loss in enumerate(made.losses, start=1)
    ]
    place, marks = 0, []
    for number, text in enumerate(texts):
        marks.append(f"{BEGAN_S + 10 + number}.125 {place} 0\n")
        place += len(text.encode()) + 1
    (attempt / "n0.out").write_text("".join(text + "\n" for text in texts))
    (attempt / "n0.times").write_text("".join(marks))
    samples = [
        {"time": BEGAN_S + number, "gpus": [{"index": gpu, "name": "A10", "temperature": one}]}
        for number, one in enumerate(made.temperatures)
        for gpu in range(2)
    ]
    (attempt / "n0.gpu.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))


# The same counted from the files, by json alone.


@dataclass(kw_only=True)
class Counted:
    """What the files of a run hold."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    """attempt, rank, step, kind, micro-batch, begin in ns since 1970, wait, work, bytes, what."""
    steps: dict[tuple[str, int, int], tuple[int, int, dict[str, int]]] = field(default_factory=dict)
    """By attempt, rank and step: begin in ns since 1970, what it took, work by kind."""
    exits: int = 0


def count_run(folder: Path) -> Counted:
    found = Counted()
    for attempt in sorted(folder.glob("attempt-*")):
        label = attempt.name.partition("-")[2]
        found.exits += len(list(attempt.glob("exit/*.json")))
        for path in sorted(attempt.glob("trace/*.jsonl")):
            lines = [parse(text) for text in path.read_text().splitlines()]
            header, clock = lines[0], lines[1]
            zero, rank = header["origin"] + clock["offset"], header["rank"]
            for line in lines[2:]:
                if isinstance(line, list):
                    kind, step, _, micro, begin, wait, work, size, what = line
                    found.events.append(
                        (label, rank, step, kind, micro, zero + begin, wait, work, size, what)
                    )
                elif line is not None:
                    works = {kind: three[2] for kind, three in line["sums"].items()}
                    place = (label, rank, line["step"])
                    found.steps[place] = (zero + line["begin"], line["took"], works)
    return found


def parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None  # torn


def list_lines(folder: Path) -> Sequence[str]:
    """Lines of all logs, without the ranks before them."""
    return [
        line.removeprefix("0: ")
        for path in sorted(folder.glob("attempt-*/*.out"))
        for line in path.read_bytes().decode().split("\n")
        if line
    ]

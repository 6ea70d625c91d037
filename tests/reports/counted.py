"""Every second of a real run, counted from its raw files; shares no code with the report's classes.

The queue is sacct's, steps are the lines of the ranks and when these were written, saves and
evaluations the events of the traces. What was lost are steps that two attempts have, and the time
between an attempt's last line and the next start.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster.lab import Lab
from tests.command import wait_for
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder

SUM_BOUND, UNKNOWN_BOUND = 0.001, 0.02
PART, EDGE_S = 0.05, 2.5
"""How far a class may be from the count: of the class, and of each rank in each attempt. Slurm has
whole seconds, lines are timed four times a second, and Slurm's prolog is in our queue."""
STEP = re.compile(
    rb"^(?:(\d+): )?.*?(?:\biteration +(\d+)/.*iteration \(ms\): ([\d.]+)"
    rb"|\bstep (\d+)/\d+|\biter (\d+): .*time ([\d.]+)ms)"
)
WITHIN = ("compute", "steps", "bubble", "communication", "data", "checkpoint", "evaluate", "other")
"""Classes within the steps; with `unknown` they are what the lines tell of."""


# The count, from the raw files alone.


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line about a step."""

    rank: int
    step: int
    took_s: float | None
    at: float


@dataclass(frozen=True, kw_only=True)
class Held:
    """From a submit or a requeue to the end, as sacct has it; seconds since 1970."""

    submitted: float
    started: float
    ended: float


def parse_held(text: str) -> list[Held]:
    """Lines of `sacct -D -P -X -o JobID,State,Submit,Start,End`; a job that lost nodes has one more
    for each size, and a het job one for each component."""
    found: list[Held] = []
    rows = [line.split("|")[:5] for line in text.splitlines()[1:]]
    rows = [row for row in rows if "+" not in row[0] or row[0].endswith("+0")]
    is_resized = False
    for _, state, *times in rows:
        held = Held(**dict(zip(("submitted", "started", "ended"), map(_parse, times), strict=True)))
        if is_resized:
            last = found.pop()
            held = Held(submitted=last.submitted, started=last.started, ended=held.ended)
        found.append(held)
        is_resized = state == "RESIZING"
    return found


def _parse(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def read_lines(attempt: Path) -> list[Line]:
    """All lines about steps of an attempt, with when they were written."""
    found = []
    for path in sorted(attempt.glob("*.out")):
        marks = [line.split() for line in path.with_suffix(".times").read_text().splitlines()]
        places = [int(mark[1]) for mark in marks]
        place = 0
        for text in path.read_bytes().splitlines(keepends=True):
            if match := STEP.match(text):
                rank, first, ms, second, third, more_ms = match.groups()
                mark = marks[bisect_right(places, place) - 1]
                took = ms or more_ms
                found.append(
                    Line(
                        rank=int(rank or 0),
                        step=int(first or second or third),
                        took_s=float(took) / 1000 if took else None,
                        at=float(mark[0]),
                    )
                )
            place += len(text)
    return found


def read_saves(attempt: Path, repeated: frozenset[int]) -> float:
    """Rank-seconds of saves and evaluations in the traces, but those of repeated steps."""
    total_ns = 0
    for path in (attempt / "trace").glob("*.jsonl"):
        for text in path.read_text().splitlines():
            if text.startswith(('["checkpoint"', '["evaluate"')):
                event = json.loads(text)
                total_ns += (event[5] + event[6]) * (event[1] not in repeated)
            elif text.startswith('{"after"'):
                sums = json.loads(text)["sums"]
                total_ns += sum(
                    sums[k][1] + sums[k][2] for k in ("checkpoint", "evaluate") if k in sums
                )
    return total_ns / 1e9


def count(run: Path, sacct: str) -> dict[str, float]:
    """Rank-seconds by class; saves are within the steps, and `after` is what Slurm's job goes on
    after an attempt that was its last. `ranks`: the number of all attempts' ranks."""
    held = parse_held(sacct)
    events = [
        json.loads(line)
        for path in run.glob("events*.jsonl")
        for line in path.read_text().splitlines()
    ]
    folders = sorted(run.glob("attempt-*"), key=lambda path: int(path.name[8:]))
    lines = [read_lines(folder) for folder in folders]
    names = ("queue", "start", "steps", "saves", "lost", "end", "all", "after", "ranks")
    found = dict.fromkeys(names, 0.0)
    before, job = held[0].submitted, -1
    for number, folder in enumerate(folders):
        plan = next(path for path in (folder / "plan.json", run / "plan.json") if path.exists())
        groups = json.loads(plan.read_text())["groups"]
        world = sum(group["count"] * group["ranks"] for group in groups)
        started, ended = _find(events, "started", number), _find(events, "ended", number)
        is_queued = job + 1 < len(held) and held[job + 1].started <= started + 1
        if is_queued:
            if job >= 0:
                found["after"] += (held[job].ended - before) * world
            job += 1
            started = held[job].started
        found["queue" if is_queued else "lost"] += (started - before) * world
        is_last = number == len(folders) - 1
        again = frozenset(line.step for later in lines[number + 1 :] for line in later)
        ranks = {line.rank for line in lines[number]}
        each = world / len(ranks)  # where one rank prints, it does so for all
        for rank in ranks:
            own = sorted((line for line in lines[number] if line.rank == rank), key=lambda x: x.at)
            first, last = own[0], own[-1]
            usual = (last.at - first.at) / max(1, len(own) - 1)
            begun = first.at - (usual if first.took_s is None else first.took_s)
            repeated_s = sum(
                usual if line.took_s is None else line.took_s for line in own if line.step in again
            )
            found["start"] += (begun - started) * each
            found["steps"] += (last.at - begun - repeated_s) * each
            found["lost"] += repeated_s * each
            found["end" if is_last else "lost"] += (ended - last.at) * each
        found["saves"] += read_saves(folder, again)
        found["all"] += (ended - before) * world
        found["ranks"] += world
        before = ended
    found["after"] += (held[job].ended - before) * world
    return found


def _find(events: Sequence[Mapping[str, Any]], kind: str, attempt: int) -> float:
    times = [e["time"] for e in events if e["kind"] == kind and e.get("attempt") == attempt]
    return float(max(times))


# The report's classes beside it.


@dataclass(frozen=True, kw_only=True)
class Row:
    """A class, in rank-seconds."""

    name: str
    reported: float
    counted: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return abs(self.reported - self.counted) <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run, as its report has it and as it was counted."""

    rows: tuple[Row, ...]
    shares: Mapping[str, float]
    overlap: float
    after_s: float
    """Of all ranks: Slurm's job after its last attempt."""
    causes: tuple[str, ...]
    """What the findings say is wrong."""

    def find_problems(self) -> list[str]:
        """Empty where all agrees."""
        found = [
            f"{row.name}: {row.reported:.2f} s in the report, {row.counted:.2f} s counted"
            for row in self.rows
            if not row.is_right
        ]
        total = sum(self.shares.values())
        if abs(total - 1) > SUM_BOUND or self.overlap > SUM_BOUND:
            found.append(f"the classes sum to {total:.4%}, {self.overlap:.4%} is claimed twice")
        if self.shares.get("unknown", 0.0) > UNKNOWN_BOUND:
            found.append(f"{self.shares['unknown']:.2%} is unknown")
        return found


def compare(run: Path, sacct: str, edge_s: float = EDGE_S) -> Result:
    """The report of a run that is over against the count; `edge_s` is for each rank and attempt."""
    from vjob.reports.analysis.findings import find_all
    from vjob.reports.analysis.measures import analyse
    from vjob.reports.load.tables import load_job

    counted = count(run, sacct)
    job = load_job(run)
    analysis = analyse(job)
    seconds = analysis.accounting.seconds
    reported = {name: seconds.get(name, 0.0) for name in ("queue", "start", "lost", "end")}
    reported["steps"] = sum(seconds.get(name, 0.0) for name in (*WITHIN, "unknown"))
    reported["saves"] = seconds.get("checkpoint", 0.0) + seconds.get("evaluate", 0.0)
    reported["all"] = analysis.accounting.total_s
    edges_s = edge_s * counted["ranks"]
    rows = [
        Row(
            name=name,
            reported=reported[name],
            counted=counted[name],
            # Traces have the saves to the nanosecond, whoever adds them up.
            allowed=PART * counted[name] + (0.05 if name == "saves" else edges_s),
        )
        for name in ("all", "queue", "start", "steps", "saves", "lost", "end")
    ]
    causes = tuple(finding.cause for finding in find_all(job, analysis) if finding.cause)
    shares, overlap = analysis.accounting.shares, analysis.accounting.overlap
    return Result(
        rows=tuple(rows),
        shares=shares,
        overlap=overlap,
        after_s=counted["after"],
        causes=causes,
    )


def ask_sacct(lab: Lab, run: RunFolder) -> str:
    """What Slurm has kept of the run's first job, once its end is among it."""
    job = str(read_json(run.record)["jobs"][0]["id"])
    command = ["sacct", "-D", "-P", "-X", "-j", job, "-o", "JobID,State,Submit,Start,End"]
    wait_for(lambda: "Unknown" not in lab.run(command).stdout.partition("\n")[2], 60)
    return lab.run(command).stdout

"""What the nodes show together of the whole job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vjob.jobs.monitor.model.snapshot import Line, Phase, Point, Progress
from vjob.jobs.monitor.readers.node_files import NodeFiles
from vjob.jobs.monitor.readers.node_logs import LogFile

NUM_ERRORS = 200
"""Lines of a known kind that a snapshot holds."""

APART_S = 1.0
"""Between the writing of two files that tell of the same moment."""


def find_progress(nodes: Iterable[NodeFiles]) -> Progress | None:
    """By the log that tells the farthest step."""
    found: tuple[tuple[int, bool], NodeFiles, LogFile] | None = None
    for node in nodes:
        for log in node.logs.values():
            if log.points:
                key = (log.points[-1].step, log.points[-1].loss is not None)
                if found is None or key > found[0]:
                    found = key, node, log
    if found is None:
        return _count_lines(nodes)
    _, node, log = found
    log.catch_up()
    points = list(log.points)
    for other in node.logs.values():  # Hugging Face: the bar and the losses in different files
        if other.loss is not None and points[-1].loss is None:
            told = other.loss
            points[-1] = replace(points[-1], loss=told.loss, grad_norm=told.grad_norm, nan=told.nan)
    return Progress(
        step=points[-1].step,
        num_steps=log.num_steps,
        at=log.point_at,  # not the line's own time: its node may be in another zone
        points=tuple(points),
        source=log.name,
        first_step=log.first_step,
    )


def _count_lines(nodes: Iterable[NodeFiles]) -> Progress | None:
    """Where lines tell no step: how many such lines came since we look."""
    logs = [log for node in nodes for log in node.logs.values() if log.loss is not None]
    if not logs:
        return None
    log = max(logs, key=lambda log: log.loss.step if log.loss else 0)
    point: Point = log.loss  # type: ignore[assignment]
    return Progress(step=point.step, at=point.at, points=(point,), source=log.name)


def find_phase(nodes: Iterable[NodeFiles], progress: Progress | None) -> Phase | None:
    """The phase that began last and has not ended, as far as lines tell, or steps since."""
    phases = [log.phase for node in nodes for log in node.logs.values() if log.phase is not None]
    found = max(phases, key=lambda phase: phase.since or 0.0, default=None)
    at = progress.at if progress is not None else None
    if found is None or found.since is None or at is None:
        return found
    return found if at <= found.since + APART_S else None


def find_last_end(nodes: Iterable[NodeFiles]) -> float | None:
    """When the last phase that is over ended."""
    ends = [log.phase_ended_at for node in nodes for log in node.logs.values()]
    return max((at for at in ends if at is not None), default=None)


def find_longest(nodes: Iterable[NodeFiles]) -> dict[str, float]:
    """Of each phase, how long it took at most."""
    longest: dict[str, float] = {}
    for node in nodes:
        for log in node.logs.values():
            for name, took in log.phases_s.items():
                longest[name] = max(took, longest.get(name, 0.0))
    return longest


def merge_errors(logs: Iterable[LogFile], ended: Mapping[int, float]) -> tuple[Line, ...]:
    """Known lines of all files, the likely first in time first, the same of many ranks once.

    A line without a time is as old as its file, or as the end of its rank: `ended` has those that
    failed by themselves.
    """
    first: dict[tuple[str, str], tuple[tuple[float, int], Line]] = {}
    writers: dict[tuple[str, str], set[tuple[str, int | None]]] = {}
    most: dict[tuple[str, str], int] = {}
    for log in logs:
        for line, ranks in zip(log.known, log.writers, strict=True):
            key = (line.kind, line.text.translate(_NO_DIGITS))
            at = line.at
            if at is None:
                at = ended.get(line.rank, log.tail.mtime) if line.rank is not None else None
            age = (log.tail.mtime if at is None else at, line.order)
            if key not in first or age < first[key][0]:
                first[key] = age, line
            writers.setdefault(key, set()).update((line.node, rank) for rank in ranks)
            most[key] = max(line.num_same, most.get(key, 0))
    merged = [
        (age, replace(line, num_same=max(len(writers[key]), most[key])))
        for key, (age, line) in first.items()
    ]
    merged.sort(key=lambda pair: pair[0])
    return tuple(line for _, line in merged[:NUM_ERRORS])


_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


def join_progress(told: Progress | None, traced: Sequence[Point]) -> Progress:
    """What logs tell and what the farthest trace tells: a line has the loss, a trace the time."""
    points = {point.step: point for point in traced}
    last = traced[-1]
    if told is None:
        return Progress(
            step=last.step,
            at=last.at,
            points=tuple(traced),
            source="trace",
            first_step=min(points),
        )
    for point in told.points:
        known = points.get(point.step)
        joined = point if known is None else replace(point, step_s=known.step_s, at=known.at)
        points[point.step] = joined
    is_ahead = told.step > last.step
    return Progress(
        step=max(last.step, told.step),
        num_steps=told.num_steps,
        at=told.at if is_ahead else last.at,
        points=tuple(points[step] for step in sorted(points)),
        source=told.source if is_ahead else "trace",
        first_step=min(points),
    )

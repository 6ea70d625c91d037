"""Log files of a node (`NodeFiles`), and facts about the job from the logs of all nodes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from re import Pattern
from typing import Any

from varuna_core.facts.known import NotKnown, Value, value_of
from varuna_core.records.files import open_file
from varuna_core.records.formatting import format_size
from varuna_core.records.logs.judge import Lines, Source, judge_steps
from varuna_core.records.logs.learner import Doubt
from varuna_core.records.logs.slow_ranks import WARM_UP_STEPS
from varuna_core.records.logs.step_counts import NUM_RECENT, StepCounts
from varuna_core.records.logs.steps import LINE, StepReader, count_epochs, find_total
from varuna_core.records.logs.times import BAR_SLACK_S, TimesTail
from vjob.jobs.monitor.log_lines.errors import Classifier, first_root
from vjob.jobs.monitor.log_lines.many_files import ManyFiles
from vjob.jobs.monitor.log_lines.tails import TAIL_BYTES, Budget, Tail
from vjob.jobs.monitor.model.snapshot import (
    COUNTED,
    AttemptView,
    Line,
    Node,
    Phase,
    Point,
    Progress,
)
from vjob.jobs.monitor.readers.gpu_logs import FIRST_BYTES, GpuSamples
from vjob.jobs.monitor.readers.node_logs import LogFile, Times

FIRST_LOOK_BYTES = 24 * 1024 * 1024
"""Bytes of all files together that their first poll reads."""
COUNTED_BYTES = 128 * 1024 * 1024
"""Most bytes of logs whose lines are counted."""
LEAST_BYTES = 8 * 1024
"""Least bytes of each file that its first poll reads."""


def choose_tail(num_files: int) -> int:
    """Return the number of bytes of each file that a first poll reads."""
    return max(LEAST_BYTES, min(TAIL_BYTES, FIRST_LOOK_BYTES // max(1, num_files)))


class NodeFiles:
    """Readers of a node's logs: <node>.out, .err, .gpu and .gpu.jsonl."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, str],
        classifier: Classifier,
        tail_bytes: int,
        num_lines: int,
        pattern: Pattern[str] | None = None,
        times: Times | None = None,
        *,
        is_ours: bool = False,
    ) -> None:
        """`files` are the paths of existing files by kind: out, err, gpu, gpu.jsonl.

        `pattern`: the user's own regular expression of lines about steps (conf key `progress`).
        `times`: when lines were written, by default from the .times file beside each log.
        `is_ours`: an agent wrote the logs, with one stream per file.
        """
        self.is_ours = is_ours
        self.name = name
        self.logs: dict[str, LogFile] = {}
        self.gpus: dict[str, GpuSamples] = {}
        self._classifier, self._tail_bytes = classifier, tail_bytes
        self._num_lines, self._pattern = num_lines, pattern
        self._times = times
        self.add(files)

    def add(self, files: Mapping[str, str]) -> None:
        """Read also these log files, by kind (`out`, `err`, ...), if they are new."""
        for kind, path in files.items():
            if kind in ("out", "err") and kind not in self.logs:
                if self._times is None:
                    self._times = TimesTail(Path(path).with_suffix(".times"))
                self.logs[kind] = LogFile(
                    path,
                    self.name,
                    os.path.basename(path),
                    self._classifier,
                    self._tail_bytes,
                    self._num_lines,
                    times=self._times,
                    pattern=self._pattern,
                    is_err=kind == "err",
                )
            elif kind.startswith("gpu") and kind not in self.gpus:
                share = 2 if kind == "gpu.jsonl" else 10
                some = min(FIRST_BYTES, self._tail_bytes // share)
                self.gpus[kind] = GpuSamples(path, tail_bytes=some)
        if "out" in self.logs:
            self.logs["out"].is_apart = self.is_ours or "err" in self.logs

    def fetch(self) -> None:
        """Read what was added to the node's logs, for the next `poll` to parse. The logs of several
        nodes may be fetched at once, each node's in a thread."""
        for tail in self.tails().values():
            tail.fetch()

    def poll(self) -> bool:
        """Parse what was added to the node's logs since the last call, reading it unless `fetch`
        has done so. Return True if anything was added, or if a search for older lines continues."""
        is_new = any(log.is_sought and log.is_unsearched for log in self.logs.values())
        for log in self.logs.values():
            is_new = log.poll() or is_new
        for samples in self.gpus.values():
            is_new = samples.poll() or is_new
        return is_new

    @property
    def newest(self) -> float | None:
        """Time of the last write to .out or .err."""
        times = [log.tail.mtime for log in self.logs.values() if log.tail.mtime]
        return max(times, default=None)

    def last_lines(self, kind: str, count: int) -> tuple[str, ...]:
        source = self.logs.get(kind) or self.gpus.get(kind)
        if source is None and kind == "gpu":
            source = self.gpus.get("gpu.jsonl")
        return source.last_lines(count) if source is not None else ()

    def sizes(self) -> dict[str, int]:
        tails = self.tails()
        return {kind: tails[kind].size for kind in ("out", "err", "gpu") if kind in tails}

    def problems(self) -> dict[str, str]:
        tails = self.tails().values()
        found = {Path(tail.path).name: tail.problem for tail in tails if tail.problem}
        for log in self.logs.values():
            if log.is_sought and log.is_unsearched and log.tail.skipped is not None:
                low, end = log.tail.skipped
                found[log.name] = (
                    f"{format_size(end - low)} not yet searched for a line about a step"
                )
        return found

    def tails(self) -> dict[str, Tail]:
        """Return the reader of each file's end, by kind."""
        logs = {kind: log.tail for kind, log in self.logs.items()}
        return logs | {kind: samples.tail for kind, samples in self.gpus.items()}

    @property
    def samples(self) -> GpuSamples | None:
        """The GPU samples of the node, from the more detailed of its logs; None without any."""
        for kind in ("gpu.jsonl", "gpu"):
            found = self.gpus.get(kind)
            if found is not None and found.at is not None:
                return found
        return None

    def build_node(self, count: int, ours: Collection[int] = ()) -> Node:
        """Return what the files tell about their node, with `count` last lines of each; `ours` are
        the pids of the node's ranks."""
        samples = self.samples
        gpus = samples.list_gpus(ours) if samples is not None else ()
        return Node(
            name=self.name,
            log_at=self.newest,
            out=self.last_lines("out", count),
            err=self.last_lines("err", count),
            gpu=self.last_lines("gpu", max(count, len(gpus))),
            sizes=self.sizes(),
            gpus=gpus,
            gpus_at=samples.at if samples is not None else None,
            cpu_percent=samples.cpu_percent if samples is not None else None,
            memory_used_mb=samples.memory_used_mb if samples is not None else None,
            memory_total_mb=samples.memory_total_mb if samples is not None else None,
        )


def poll_all(nodes: Sequence[NodeFiles], many: ManyFiles) -> Iterator[tuple[NodeFiles, bool]]:
    """Poll the logs of all nodes, fetching those of several at once if the file server is slow.
    Yield the files of each node, with what their `poll` returned."""
    for files, _ in zip(nodes, many.call(NodeFiles.fetch, nodes), strict=True):
        yield files, files.poll()


def count_lines(
    files: Mapping[str, NodeFiles], names: Collection[str]
) -> dict[str, dict[str, int]]:
    """Count the lines of these nodes' logs by kind; return none if the logs are too large."""
    tails = {name: files[name].tails() for name in names if name in files}
    if sum(tail.size for held in tails.values() for tail in held.values()) > COUNTED_BYTES:
        return {}
    return {
        name: {kind: _count(held[kind].path) for kind in ("out", "err", "gpu") if kind in held}
        for name, held in tails.items()
    }


def _count(path: str) -> int:
    count = 0
    try:
        with open_file(Path(path)) as handle:
            while block := handle.read(1 << 20):
                count += block.count(b"\n")
    except OSError:
        return count
    return count


NUM_ERRORS = 200
"""Most lines of a known kind in a snapshot."""
MOST_LEARNED = 8
"""Most logs whose older lines are read to learn a pattern, if no single line is certain to be about
a step."""
LEAST_EARLY = 20
"""Least number of early intervals of an attempt with which its last steps are compared."""
NO_ENDS: Mapping[int, float] = {}
APART_S = 1.0
"""Seconds by which the write times of two files may differ for the same event."""


def view_logs(
    nodes: Collection[NodeFiles], progress: Progress | None, ended: Mapping[int, float] = NO_ENDS
) -> AttemptView:
    """Return what the logs of all nodes tell about an attempt; see `merge_errors` for `ended`."""
    logs = _list_logs(nodes)
    return AttemptView(
        progress=progress,
        doubt=_find_doubt(logs) if progress is None else None,
        loss=find_loss(nodes),
        norms=max((tuple(log.norms) for log in logs if log.norms), key=_dated, default=()),
        phase=_find_phase(logs, progress),
        phases_s=_find_longest(logs),
        phase_ended_at=max((x.phase_ended_at for x in logs if x.phase_ended_at), default=None),
        errors=merge_errors(logs, ended),
        saved=max((x.saved for x in logs if x.saved), key=_written_by, default=None),
        unreadable={name: why for files in nodes for name, why in files.problems().items()},
    )


def _dated(points: Sequence[Point]) -> float:
    return points[-1].at or 0.0


def _written_by(line: Line) -> float:
    return line.written_by or 0.0


def find_progress(nodes: Collection[NodeFiles]) -> Progress | None:
    """Return the job's progress from the log with the surest step lines, then the highest step."""
    for node in nodes:  # the bar and the losses may be in different files
        if any(log.trains for log in node.logs.values()):
            for log in node.logs.values():
                log.trains = True
    _search_back(nodes)
    found = _choose_farthest(nodes)
    if found is None:
        for other in [one for one in _list_logs(nodes) if one.is_behind][:MOST_LEARNED]:
            other.catch_up()
        found = _choose_farthest(nodes)
    if found is None:
        return _count_epochs(nodes)
    node, log = found
    log.catch_up()
    if not log.points or log.doubt is not None:  # which its older lines show
        return find_progress(nodes)
    points = list(log.points)
    by_lines = find_loss([node])  # Hugging Face: the bar and the losses in different files
    if by_lines is not None and points[-1].loss is None:
        points[-1] = replace(
            points[-1], loss=by_lines.loss, grad_norm=by_lines.grad_norm, nan=by_lines.nan
        )
    at, is_older = log.find_step_time()
    return Progress(
        step=points[-1].step,
        num_steps=log.num_steps or find_total(points[-1].step, _list_others(node, log)),
        at=at,  # not the line's own time: its node may be in another zone
        is_older=is_older,
        points=tuple(points),
        source=log.name,
        first_step=log.first_step,
        is_least=log.is_least,
        unit=log.unit,
    )


def _list_others(node: NodeFiles, log: LogFile) -> list[StepReader]:
    """Return the step readers of the node's other logs, which may have the number of steps."""
    return [one.steps for one in node.logs.values() if one is not log and log.unit == "step"]


def _count_epochs(nodes: Iterable[NodeFiles]) -> Progress | None:
    """Return progress from lines with epochs, if no line has a step."""
    shared = [(node, log) for node in nodes for log in node.logs.values() if log.shares]
    if not shared:
        return None
    node, log = max(shared, key=lambda pair: pair[1].shares[-1][0])
    readers = [one.steps for one in node.logs.values()]
    steps, total, unit = count_epochs([share for share, _ in log.shares], readers)
    if not steps[-1] and total is None:
        return None  # the first epoch, of nobody knows how many
    points = [replace(one[1], step=step) for step, one in zip(steps, log.shares, strict=True)]
    return Progress(
        step=steps[-1], num_steps=total, at=points[-1].at or log.tail.mtime,
        points=tuple(points), source=log.name, first_step=steps[0], unit=unit,
    )  # fmt: skip


def _search_back(nodes: Collection[NodeFiles]) -> None:
    """Search skipped parts for lines about steps, in logs that had such lines; if no log is
    reliable, in all."""
    logs = [log for log in _list_logs(nodes) if log.is_unsearched]
    if not logs:
        return
    best = _choose_farthest(nodes)
    is_known = best is not None and best[1].strength >= LINE
    budget = Budget()
    for log in sorted(logs, key=lambda log: -log.tail.mtime):
        if log.points or not is_known:
            log.is_sought = True
            log.search_back(budget)


def _find_doubt(logs: Iterable[LogFile]) -> Doubt | None:
    """Return why no step is known although some lines look like steps; None if no line does."""
    doubts = {log.doubt for log in logs}
    return next((doubt for doubt in Doubt if doubt in doubts), None)


def find_loss(nodes: Iterable[NodeFiles]) -> Point | None:
    """Return the newest loss on a line without a step; None if there is none."""
    losses = [log.loss for log in _list_logs(nodes) if log.loss is not None]
    return max(losses, key=lambda loss: loss.at or 0.0, default=None)


def _list_logs(nodes: Iterable[NodeFiles]) -> list[LogFile]:
    return [log for node in nodes for log in node.logs.values()]


def _choose_farthest(nodes: Iterable[NodeFiles]) -> tuple[NodeFiles, LogFile] | None:
    found: tuple[tuple[int, int, bool], NodeFiles, LogFile] | None = None
    for node in nodes:
        for log in node.logs.values():
            if log.points and log.doubt is None:
                key = (log.strength, log.points[-1].step, log.points[-1].loss is not None)
                if found is None or key > found[0]:
                    found = key, node, log
    return None if found is None else found[1:]


def find_fatal(nodes: Iterable[NodeFiles]) -> Line | None:
    """Return the line of a fatal error after the last step in the logs; None if there is none.

    In a file with steps, the line must follow the last step; a file without steps must have been
    written as late as those with steps.
    """
    logs = _list_logs(nodes)
    times = [log.tail.mtime for log in logs if log.step_order >= 0]
    last = max(times, default=0.0)
    found = [
        log.fatal
        for log in logs
        if log.fatal is not None
        if log.fatal.order > log.step_order
        if log.step_order >= 0 or log.tail.mtime >= last - APART_S
    ]
    return first_root(found)


def _find_phase(logs: Iterable[LogFile], progress: Progress | None) -> Phase | None:
    """Return the last phase if neither a line nor a later step shows that the phase has ended; else
    None."""
    phases = [log.phase for log in logs if log.phase is not None]
    found = max(phases, key=lambda phase: phase.since or 0.0, default=None)
    at = progress.at if progress is not None else None
    if found is None or found.since is None or at is None:
        return found
    return found if at <= found.since + APART_S else None


def _find_longest(logs: Iterable[LogFile]) -> dict[str, float]:
    """Return the longest duration of each kind of phase (checkpoint, evaluation), in seconds."""
    longest: dict[str, float] = {}
    for log in logs:
        for name, took in log.phases_s.items():
            longest[name] = max(took, longest.get(name, 0.0))
    return longest


def merge_errors(logs: Iterable[LogFile], ended: Mapping[int, float] = NO_ENDS) -> tuple[Line, ...]:
    """Merge the known lines of all files, likely earliest first, with equal lines of ranks once.

    A line without a time takes the end time of its rank from `ended`, which has the ranks that
    failed by themselves, or else the file's time.
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


def join_progress(by_lines: Progress | None, traced: Sequence[Point]) -> Progress:
    """Merge progress of logs, which have the loss, and of the farthest trace, with its times."""
    points = {point.step: point for point in traced}
    last = traced[-1]
    steps = judge_steps(_to_lines(by_lines), {}, traced=(last.step, last.at))
    for point in by_lines.points if by_lines is not None else ():
        known = points.get(point.step)
        joined = point if known is None else replace(point, step_s=known.step_s, at=known.at)
        points[point.step] = joined
    is_ahead = by_lines is not None and steps.source is Source.LINES
    return Progress(
        step=value_of(steps.step) or 0,
        num_steps=value_of(steps.total),
        at=by_lines.at if by_lines is not None and is_ahead else last.at,
        points=tuple(points[step] for step in sorted(points)),
        source=by_lines.source if by_lines is not None and is_ahead else Source.TRACE.value,
        first_step=min(points),
    )


def _to_lines(progress: Progress | None) -> Lines | None:
    if progress is None:
        return None
    pairs = tuple((point.step, point.at) for point in progress.points)
    return Lines(
        progress.step, progress.num_steps, pairs, progress.source, BAR_SLACK_S, progress.unit,
        progress.is_least,
    )  # fmt: skip


def join_counts(
    by_lines: Progress | None,
    counts: Mapping[int, StepCounts],
    reference: int | None,
    offset_s: float,
    loss: Point | None,
) -> Progress | None:
    """Merge progress from logs, which have step numbers and losses, and the counted optimizer
    steps.

    `reference` is a rank of the node that printed the lines; `offset_s` is the file server's clock
    minus that of the rank with the most steps; `loss` is a loss printed without a step.
    """
    steps = judge_steps(_to_lines(by_lines), counts, reference)
    rank = max(sorted(counts), key=lambda one: counts[one].count)
    own = counts[rank]
    at = own.last_at + offset_s
    known: dict[str, Any] = {
        "other": steps.other,
        "longest_s": max((x.seconds for x in own.longest), default=None),
    }
    if isinstance(steps.done, Value):
        known["done"] = steps.done.value
    if steps.source is not Source.COUNTER or isinstance(steps.step, NotKnown):
        return (
            None if by_lines is None else replace(by_lines, at=max(at, by_lines.at or at), **known)
        )
    is_same = not steps.is_counted
    base = steps.step.value - own.count
    first = (steps.fit.offset if is_same and steps.fit else None) or 0
    points = {point.step: point for point in _list_points(own, base, offset_s)}
    for point in by_lines.points if by_lines is not None else ():
        done = point.step - base if is_same else None
        if done is None and point.at is not None:
            done = int(counts[rank if reference is None else reference].count_at(point.at))
        if done is not None and 0 < done <= own.count:
            before, after = _bracket(own, done)
            step_s = (after[1] - before[1]) / (after[0] - before[0] or 1)
            end = before[1] + (done - before[0]) * step_s + offset_s
            timed = points.get(base + done)  # else its time is in the mean of a later point
            mean = None if timed is None else timed.step_s
            points[base + done] = replace(point, step=base + done, at=end, step_s=mean)
    ordered = [points[step] for step in sorted(points)]
    if loss is not None and not any(point.loss is not None for point in ordered):
        ordered[-1] = replace(ordered[-1], loss=loss.loss, grad_norm=loss.grad_norm, nan=loss.nan)
    return Progress(
        step=steps.step.value,
        num_steps=steps.total.value if isinstance(steps.total, Value) else None,
        at=at,
        points=tuple(ordered),
        source=COUNTED,
        first_step=first + 1,
        is_counted=steps.is_counted,
        is_least=steps.is_least,
        early_times=tuple(_list_early(own)),
        **known,
    )


def add_median(progress: Progress, counts: StepCounts) -> Progress:
    """Add the median of all counted steps of an attempt that is over."""
    if not counts.is_of_all or progress.unit != "step":
        return progress
    return replace(progress, median_s=counts.median_s, num_timed=counts.num_timed)


def _list_points(own: StepCounts, base: int, offset_s: float) -> Iterator[Point]:
    """Yield the last points, each with the mean step time since the previous point."""
    recent = own.points[-NUM_RECENT:]
    for before, (count, end) in zip((None, *recent), recent, strict=False):
        step_s = None if before is None else (end - before[1]) / max(1, count - before[0])
        yield Point(step=base + count, step_s=step_s, at=end + offset_s)


def _list_early(own: StepCounts) -> Iterator[float]:
    """Yield the seconds a step of each early interval between two counts of optimizer steps.

    The warm-up and the last `NUM_RECENT` points are excluded. The first quarter of the remaining
    intervals is early, and at least `LEAST_EARLY` intervals if there are as many.
    """
    old = [point for point in own.points[:-NUM_RECENT] if point[0] > WARM_UP_STEPS]
    for (done, since), (count, until) in pairwise(old[: max(LEAST_EARLY, len(old) // 4) + 1]):
        yield (until - since) / max(1, count - done)


def _bracket(own: StepCounts, done: int) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return the points before and after a step."""
    after = next((at for at, point in enumerate(own.points) if point[0] >= done), 0)
    return own.points[max(0, after - 1)], own.points[after]

"""Readers of an attempt's small files: traces and steps of ranks, heartbeats of nodes, exits.

`JsonFolder` reads changed files of a folder whose files are written atomically. A rename changes
the folder's own time, so a folder with the same time as at the last two polls has nothing new.
Opening the folder first makes NFS ask its server.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from varuna_core.records.exits import Outcome
from varuna_core.records.files import (
    as_number,
    as_whole,
    expect_types,
    is_foreign_link,
    parse_json,
    parse_object,
)
from varuna_core.records.logs.slow_ranks import RECENT_STEPS, WARM_UP_STEPS
from varuna_core.records.logs.step_counts import StepCounts, parse_counts
from varuna_core.records.logs.trace import COMPUTE
from varuna_core.records.runfolder import AttemptFolder
from vjob.jobs.monitor.log_lines.many_files import ManyFiles
from vjob.jobs.monitor.log_lines.tails import Added, Tail
from vjob.jobs.monitor.model.snapshot import Point

MOST_BYTES = 4 * 1024 * 1024
"""Most bytes read of one file; the agent's files are far smaller."""


class JsonFolder:
    """The parsed files of a folder, keyed by name without `.json`."""

    def __init__(self, path: Path, many: ManyFiles) -> None:
        self.path = path
        self._many = many
        self.values: dict[str, dict[str, Any]] = {}
        self.times: dict[str, float] = {}
        """Modification time of each file."""
        self._marks: dict[str, tuple[int, int, int]] = {}
        self._seen: tuple[int, int] | None = None
        self._is_settled = False
        """True once a later poll found nothing new, since two renames may share one tick of the
        clock."""

    def value(self, stem: str) -> dict[str, Any]:
        """Return the parsed file; for a shared run of another user, its copy without secrets."""
        return self.values.get(stem) or self.values.get(f"{stem}.shared") or {}

    def time(self, stem: str) -> float | None:
        return self.times.get(stem) or self.times.get(f"{stem}.shared")

    def poll(self) -> list[str]:
        """Read changed files; return their names."""
        try:
            if is_foreign_link(self.path):
                return []
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            found = os.fstat(fd)
            mark = (found.st_ino, found.st_mtime_ns)
            if mark == self._seen and self._is_settled:
                return []
            changed = list(self._read_changed(fd))
            self._is_settled = mark == self._seen and not changed
            self._seen = mark
            return changed
        except OSError:
            return []
        finally:
            os.close(fd)

    def _read_changed(self, fd: int) -> Iterator[str]:
        names = os.listdir(fd)
        for stem in self._marks.keys() - {name[:-5] for name in names}:
            for held in (self.values, self.times, self._marks):
                held.pop(stem, None)
        names = [name for name in names if name.endswith(".json") and not name.startswith(".")]
        contents = self._many.call(partial(self._read_if_changed, fd), names)
        for name, read in zip(names, contents, strict=True):
            value = None if read is None else parse_json(read[0])
            if read is not None and isinstance(value, dict):
                stem, (_, found) = name[:-5], read
                self._marks[stem] = _mark(found)
                self.values[stem], self.times[stem] = value, found.st_mtime
                yield stem

    def _read_if_changed(self, fd: int, name: str) -> tuple[bytes, os.stat_result] | None:
        seen = self._marks.get(name[:-5])
        try:
            is_seen = seen is not None and seen == _mark(os.stat(name, dir_fd=fd))
            return None if is_seen else _read(name, fd)
        except OSError:
            return None


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(name: str, folder: int | None = None) -> tuple[bytes, os.stat_result]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(name, flags, dir_fd=folder)
    try:
        found = os.fstat(fd)
        return os.read(fd, min(found.st_size, MOST_BYTES)), found
    finally:
        os.close(fd)


NUM_STEPS = 300
NUM_MEDIAN = 10
"""Number of last steps from which a rank's medians are computed."""
FIRST_BYTES = 16 * 1024
MORE_BYTES = 1024 * 1024
"""Bytes that are read from the end of a trace if FIRST_BYTES contain only details of one step."""
HEAD_BYTES = 16 * 1024
RANKS_OF_NODE = 8
"""Number of ranks assumed in a node's trace file: so many times the bytes of one rank are read."""


@dataclass(frozen=True)
class RankStep:
    """The totals of one step of one rank."""

    step: int
    took_s: float
    work_s: float | None
    """Seconds in the rank's own forward and backward passes."""
    checkpoint_s: float
    end_at: float | None


class TraceFile:
    """The last steps in one trace file, of all ranks of a node or of one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks: dict[int, TraceEnd] = {}
        # A file of one rank has its number for a name, and no line says whose the next ones are.
        self._own = as_whole(path.stem)
        self._share = 1 if self._own is not None else RANKS_OF_NODE
        self._rank = self._own
        self.tail = self._open(FIRST_BYTES)

    def _open(self, tail_bytes: int) -> Tail:
        return Tail(self.path, tail_bytes=tail_bytes * self._share, head_bytes=HEAD_BYTES)

    def fetch(self) -> None:
        """Read what was added to the file, for the next `poll` to parse. Several files may be
        fetched at once, each in a thread."""
        self.tail.fetch()

    def poll(self) -> set[int]:
        """Parse the lines that were added to the file since the last call, reading them unless
        `fetch` has done so. Return the ranks that wrote them."""
        added = self.tail.poll()
        if added is None:
            return set()
        changed = self._take(added)
        is_short = not self.ranks or not all(end.steps for end in self.ranks.values())
        if added.is_anew and added.num_skipped and is_short:
            self.tail = self._open(MORE_BYTES)
            again = self.tail.poll()
            if again is not None:
                changed |= self._take(again)
        return changed

    def _take(self, added: Added) -> set[int]:
        if added.is_anew:
            self.ranks = {}
            self._rank = self._own
            self._read(self.tail.head)
        if added.num_skipped:  # they may end in the midst of another rank's batch
            self._rank = self._own
        return self._read(added.data)

    def _read(self, data: bytes) -> set[int]:
        changed: set[int] = set()
        if b'{"' not in data:
            return changed
        for line in data.split(b"\n"):
            if line.startswith(b'{"step"'):
                if self._rank is not None:
                    self._find().read_step(line)
                    changed.add(self._rank)
            elif line.startswith((b'{"trace"', b'{"rank"')):
                value = parse_object(line)
                rank = value.get("rank", self._rank)
                if isinstance(rank, int):
                    self._rank = rank
                    if "trace" in value:
                        self._find().read_header(value)
                        changed.add(rank)
        return changed

    def _find(self) -> TraceEnd:
        assert self._rank is not None
        return self.ranks.setdefault(self._rank, TraceEnd())


class TraceFolder:
    """Reader of all traces of an attempt."""

    def __init__(self, attempt: AttemptFolder, many: ManyFiles) -> None:
        self._many = many
        self.ranks: dict[int, TraceEnd] = {}
        self.times: list[float] = []
        """Modification times of the files that had changed at the last poll."""
        self._attempt = attempt
        self._files: dict[Path, TraceFile] = {}

    def find(self) -> None:
        """Look for trace files that have appeared since the last call."""
        for path in self._attempt.list_traces():
            if path not in self._files:
                self._files[path] = TraceFile(path)

    def poll(self) -> set[int]:
        """Read the lines that were added to all trace files; return the ranks that wrote them."""
        changed: set[int] = set()
        self.times = []
        files = [*self._files.values()]
        for file, _ in zip(files, self._many.call(TraceFile.fetch, files), strict=True):
            if found := file.poll():
                changed |= found
                self.times.append(file.tail.mtime)
                self.ranks.update(file.ranks)
        return changed


MOST_COUNTED = 64
"""Most step files that are read; of a larger job, those of evenly spaced ranks."""


class StepsFolder:
    """Reader of the optimizer steps of an attempt's ranks."""

    def __init__(self, attempt: AttemptFolder) -> None:
        self.counts: dict[int, StepCounts] = {}
        self.times: list[float] = []
        """Modification times of the files that had changed at the last poll."""
        self._attempt = attempt
        self._paths: dict[int, Path] = {}
        self._marks: dict[int, tuple[int, int, int]] = {}

    def find(self) -> None:
        """Look for step files that have appeared since the last call."""
        found = self._attempt.list_steps()
        every = -(-len(found) // MOST_COUNTED)
        self._paths = {rank: found[rank] for rank in sorted(found)[:: every or 1]}

    def poll(self) -> set[int]:
        """Read the step files that have changed; return their ranks."""
        changed: set[int] = set()
        self.times = []
        for rank, path in self._paths.items():
            try:
                if self._marks.get(rank) == _mark(os.lstat(path)):
                    continue
                data, found = _read(str(path))
            except OSError:
                continue
            counts = parse_counts(data)
            if counts is not None and counts.count:
                self._marks[rank], self.counts[rank] = _mark(found), counts
                self.times.append(found.st_mtime)
                changed.add(rank)
        return changed


class TraceEnd:
    """The last steps of one rank."""

    def __init__(self) -> None:
        self.steps: deque[RankStep] = deque(maxlen=NUM_STEPS)
        self.device = ""
        self.stages: tuple[int, ...] = ()
        self._origin: int | None = None

    def read_header(self, value: Mapping[str, Any]) -> None:
        origin = value.get("origin")
        self._origin = origin if isinstance(origin, int) else None
        self.device = str(value.get("device") or "")[:80]
        stages = value.get("stages")
        if isinstance(stages, list) and all(isinstance(stage, int) for stage in stages):
            self.stages = tuple(stages)

    def read_step(self, line: bytes) -> None:
        value = parse_object(line)
        try:
            begin, took, sums = int(value["begin"]), int(value["took"]), value.get("sums") or {}
            works = [float(sums[kind][2]) for kind in COMPUTE if kind in sums]
            saved = sums.get("checkpoint") or (0, 0, 0)
            found = RankStep(
                step=int(value["step"]),
                took_s=took / 1e9,
                work_s=sum(works) / 1e9 if works else None,
                checkpoint_s=(float(saved[1]) + float(saved[2])) / 1e9,
                end_at=None if self._origin is None else (self._origin + begin + took) / 1e9,
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            return
        if self.steps and found.step <= self.steps[-1].step:  # a restart in the same file
            self.steps.clear()
        self.steps.append(found)

    @property
    def last(self) -> RankStep | None:
        return self.steps[-1] if self.steps else None

    def works_s(self) -> dict[int, float]:
        """Return the seconds that the rank itself computed, by step, without the first steps."""
        steps = list(self.steps)[WARM_UP_STEPS:][-RECENT_STEPS:]
        return {step.step: step.work_s for step in steps if step.work_s is not None}

    def medians(self) -> tuple[float | None, float | None]:
        """Return the medians of the last steps: a whole step without checkpoints, and the rank's
        own computation."""
        recent = list(self.steps)[-NUM_MEDIAN:]
        if not recent:
            return None, None
        works = [step.work_s for step in recent if step.work_s is not None]
        whole = statistics.median(step.took_s - step.checkpoint_s for step in recent)
        return whole, statistics.median(works) if works else None

    def points(self, offset_s: float) -> tuple[Point, ...]:
        """Return the steps as points; `offset_s` is the file server's clock minus the rank's."""
        return tuple(
            Point(
                step=step.step,
                step_s=step.took_s - step.checkpoint_s,
                at=None if step.end_at is None else step.end_at + offset_s,
            )
            for step in self.steps
        )


@dataclass
class Process:
    """Process of a rank, according to its node's heartbeats."""

    pid: int | None = None
    state: str = ""
    cpu_s: float | None = None
    told_at: float | None = None
    cpu_percent: float | None = None


class Beats:
    """Heartbeats of one node, with the states of its ranks' processes."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self.is_done = False
        self.state = ""
        self.heard_usr1: bool | None = None
        self.every_s: float | None = None
        """Seconds until the next heartbeat, as long as the node is connected to its hub."""

    def note(self, value: Mapping[str, Any]) -> None:
        """Update the state from a new heartbeat of the node."""
        self.every_s = as_number(value.get("every_s"))
        self.state = str(value.get("state", ""))
        self.is_done = self.state == "done"
        heard = value.get("heard_usr1")
        self.heard_usr1 = heard if isinstance(heard, bool) else None
        at = as_number(value.get("time"))
        told = value.get("ranks")
        for key, facts in told.items() if isinstance(told, dict) else ():
            if not key.isdecimal() or not isinstance(facts, dict):
                continue
            process = self.processes.setdefault(int(key), Process())
            pid = facts.get("pid")
            cpu_s = as_number(facts.get("cpu_s"))
            if pid != process.pid:
                process.cpu_percent = process.cpu_s = None
            elif None not in (cpu_s, process.cpu_s, at, process.told_at):
                passed = at - process.told_at  # type: ignore[operator]
                if passed > 0.1:
                    used = cpu_s - process.cpu_s  # type: ignore[operator]
                    process.cpu_percent = round(max(0.0, 100 * used / passed), 1)
            process.pid = pid if isinstance(pid, int) else None
            process.state = str(facts.get("state") or "")[:1]
            process.cpu_s, process.told_at = cpu_s, at


def parse_outcome(value: Mapping[str, Any] | None) -> Outcome | None:
    """Parse the outcome of an attempt; None if it cannot be read, as from another version."""
    try:
        return expect_types(Outcome(**value)) if value is not None else None
    except TypeError:
        return None

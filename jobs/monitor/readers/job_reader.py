"""Reader of a run, a bare folder of logs or another Slurm job, and the verdict with each look."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from vjob.jobs.monitor.model.snapshot import Snapshot, Verdict
from vjob.jobs.monitor.readers.log_folder import FolderReader, is_bare_folder
from vjob.jobs.monitor.readers.node_logs import NUM_SHOWN
from vjob.jobs.monitor.rules.judge import LOOKS, judge

NUM_LINES = 10


class Reader(Protocol):
    """Reads snapshots of one job; keeps what it has read in between."""

    def read(self) -> Snapshot: ...

    def count_lines(self, nodes: Collection[str]) -> Mapping[str, Mapping[str, int]]:
        """Lines of these nodes' logs, by kind; none where counting would take long."""
        ...


def open_reader(job: str, here: Path, *, num_lines: int = NUM_LINES) -> Reader:
    """JOB as `vjob` takes it, or the path of a bare folder of logs. InputError where it is none."""
    num_lines = max(0, min(num_lines, NUM_SHOWN))
    path = Path(job).expanduser()
    if job.strip() and ("/" in job or path.is_dir()):
        path = path if path.is_absolute() else here / path
        if is_bare_folder(path):
            return FolderReader(path.resolve(), num_lines=num_lines)
    from vjob.jobs.monitor.readers.run import RunReader
    from vjob.jobs.runs.foreign_job import find_run_or_job
    from vjob.jobs.schedulers.foreign_job import ForeignJob

    found = find_run_or_job(job, here)
    if isinstance(found, ForeignJob):
        from vjob.jobs.monitor.readers.slurm_job import SlurmJobReader

        return SlurmJobReader(found, num_lines=num_lines)
    return RunReader(found, num_lines=num_lines)


class JudgedReader:
    """Reads snapshots and evaluates them, in the light of the last few."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._history: deque[Snapshot] = deque(maxlen=LOOKS)

    def read(self) -> tuple[Snapshot, Verdict]:
        snapshot = self._reader.read()
        verdict = judge(snapshot, list(self._history))
        self._history.append(snapshot)
        return snapshot, verdict

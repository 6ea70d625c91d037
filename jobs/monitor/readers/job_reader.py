"""Reader of a run, a bare folder of logs or another Slurm job, with a verdict on each snapshot."""

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
    """Incremental reader of snapshots of one job."""

    def read(self) -> Snapshot: ...

    def count_lines(self, nodes: Collection[str]) -> Mapping[str, Mapping[str, int]]:
        """Count the lines of these nodes' logs by kind; return none if counting would take long."""
        ...


def open_reader(job: str, here: Path, *, num_lines: int = NUM_LINES) -> Reader:
    """Return a reader for JOB as `vjob` takes it, or for the path of a bare folder of logs; raise
    InputError if `job` is neither."""
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
    """Reader that also judges each snapshot, with the last few as history."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._history: deque[Snapshot] = deque(maxlen=LOOKS)

    @property
    def last(self) -> Snapshot | None:
        """The last snapshot; None before the first read."""
        return self._history[-1] if self._history else None

    def find_logs(self) -> Mapping[str, Mapping[str, str]]:
        """Return the paths of logs by node and kind, if they are not in one folder."""
        found: Mapping[str, Mapping[str, str]] = getattr(self._reader, "find_logs", dict)()
        return found

    def read(self) -> tuple[Snapshot, Verdict]:
        snapshot = self._reader.read()
        verdict = judge(snapshot, list(self._history))
        self._history.append(snapshot)
        return snapshot, verdict

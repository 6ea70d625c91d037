"""Runs as gauges for Prometheus: one file for the textfile collector of node exporter.

The names are those of a run's own file (`track.openmetrics`), as far as they tell the same. A label
`name` beside `run` sets its series apart from those of such a file in the same folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from varuna_core.agent.track.openmetrics import Gauge, write_gauges
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.model.run_row import RunRow
from vjob.jobs.monitor.model.snapshot import ENDED, Health, Snapshot, Verdict
from vjob.jobs.monitor.readers.run_table import find_finite
from vjob.jobs.monitor.rules.pace import find_left_s, find_pace_s
from vjob.shelf.watch.watch import Look

MOST_ENDED = 100
"""Of runs that are over only so many, the newest: each name of a run is another series."""
NOT_UP = (*ENDED, Health.PENDING, Health.REQUEUED, Health.UNKNOWN)


def check_file(path: Path) -> None:
    """Refuse what no exporter would read, or nobody could write."""
    if path.suffix != ".prom":
        raise InputError(f"--openmetrics {path}: the name must end in .prom for node exporter")
    if not path.parent.is_dir():
        raise InputError(f"--openmetrics {path}: {path.parent} is no folder")


def build_gauges(rows: Sequence[RunRow], now: float) -> Iterator[Gauge]:
    """A series a run and number; a run without the number has none.

    An id may be that of several runs, in folders of their own: the newest that goes on counts.
    """
    chosen = {(row.run, row.name): row for row in sorted(rows, key=lambda row: not row.is_over)}
    for row in chosen.values():
        labels = (("run", row.run), ("name", row.name))
        is_up = row.verdict is not None and row.verdict.health not in NOT_UP
        numbers = {
            "vjob_run_up": float(is_up),
            "vjob_attempt": row.attempt,
            "vjob_step": row.step,
            "vjob_steps": row.num_steps,
            "vjob_step_seconds": row.step_s,
            "vjob_left_seconds": row.left_s,
            "vjob_loss": row.loss,
            "vjob_submitted_timestamp_seconds": row.submitted,
            "vjob_updated_timestamp_seconds": round(now, 3),
        }
        yield Gauge("vjob_run_state", 1.0, (*labels, ("state", row.health)))
        for name, value in numbers.items():
            if value is not None:
                yield Gauge(name, float(value), labels)


def choose_rows(rows: Sequence[RunRow]) -> list[RunRow]:
    """All that go on, and the newest of the others, as far as they are judged."""
    ended = [row for row in rows if row.is_over and row.verdict is not None][-MOST_ENDED:]
    kept = {id(row) for row in ended}
    return [row for row in rows if not row.is_over or id(row) in kept]


def make_row(snapshot: Snapshot, verdict: Verdict, name: str) -> RunRow:
    """The row of a job that is watched by itself."""
    progress = snapshot.progress
    is_over = verdict.health in ENDED
    return RunRow(
        run=snapshot.run,
        name=name,
        folder=snapshot.folder,
        jobs=tuple(job.id for job in snapshot.scheduler.jobs),
        state=snapshot.state,
        is_over=is_over,
        submitted=snapshot.submitted,
        age_s=None,
        verdict=verdict,
        message=verdict.reason,
        attempt=snapshot.attempt,
        step=progress.step if progress is not None else None,
        num_steps=progress.num_steps if progress is not None else None,
        step_s=find_finite(find_pace_s(snapshot)),
        left_s=None if is_over else find_finite(find_left_s(snapshot)),
        loss=progress.loss if progress is not None else None,
    )


class GaugeFile:
    """The file; that it cannot be written is said once, and tried again."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        check_file(path)
        self._path, self._complain = path, complain
        self._said = ""

    def write(self, rows: Sequence[RunRow], now: float, problem: str = "") -> None:
        """Whole or not at all. `problem`: of reading the rows."""
        try:
            write_gauges(self._path, build_gauges(choose_rows(rows), now))
        except OSError as error:
            problem = f"--openmetrics {self._path}: {error.strerror}"
        self.say(problem)

    @property
    def is_well(self) -> bool:
        return not self._said

    def say(self, problem: str) -> None:
        """Say what is wrong; empty where all is well again."""
        if problem and problem != self._said:
            self._complain(problem)
        self._said = problem


def export_runs(
    file: GaugeFile,
    read: Callable[[], tuple[list[RunRow], str]],
    clock: Callable[[], float],
    wait: Callable[[], bool],
) -> None:
    """Write the rows again and again, until `wait` says that it is enough.

    `read` tells with them why a scheduler did not answer."""
    while True:
        try:
            rows, problem = read()
            file.write(rows, clock(), problem)
        except (VjobError, OSError) as error:
            file.say(str(error))
        if not wait():
            return


def export_look(look: Look, file: GaugeFile, name: str) -> Look:
    """The same looks, each of which is written."""

    def look_and_write() -> tuple[Snapshot, Verdict]:
        snapshot, verdict = look()
        file.write([make_row(snapshot, verdict, name)], snapshot.now)
        return snapshot, verdict

    return look_and_write

"""Reader of the list of all runs: one row each, with its verdict.

    index ─► runs ─► view_runs (one question to each scheduler) ─► a reader a run that goes on
                                                                └─► over: judged once, then kept

A run that is over no longer changes, so only its record's time is checked. Reading the logs of old
runs may take long, so a refresh reads as many as its budget allows, the newest first; until a run
is read, its row has the record's message and no verdict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from varuna_core.facts.finding import Finding
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.run_row import RunRow
from vjob.jobs.monitor.model.snapshot import ENDED, Health, Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.readers.scheduler import SchedulerDesk
from vjob.jobs.monitor.rules.pace import find_left_s, find_pace_s
from vjob.jobs.runs.find import RemovedRun, RunView, find_removed, is_over, read_mtime, view_runs
from vjob.jobs.schedulers import run_index as index

BUDGET_S = 1.0
LATE_S = 60.0
"""Seconds after a run's end during which its outcome may still appear or be replaced."""


class RunTable:
    """Incremental reader of the rows of all runs."""

    def __init__(
        self,
        limit: int | None = None,
        *,
        warn: bool = True,
        budget_s: float = BUDGET_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`limit`: the number of newest runs to read; `warn`: log a scheduler that does not answer;
        `budget_s`: seconds per refresh for the logs of runs that are over."""
        self.problem = ""
        """Why a scheduler did not answer at the last refresh."""
        self.asked: float | None = None
        """Time as of which the oldest of the schedulers' answers is true."""
        self._limit, self._warn, self._clock = limit, warn, clock
        self._budget_s = budget_s
        self._live: dict[str, _LiveRun] = {}
        self._over: dict[str, tuple[float, RunRow]] = {}
        """Rows of judged runs that are over, with the modification times of their records."""

    def read(self) -> list[RunRow]:
        """Return the rows, the newest run last."""
        index.check_readable()
        runs = index.list_runs()
        runs = runs[-self._limit :] if self._limit else runs
        now = self._clock()
        changed = [run for run in runs if not self._is_settled(run)]
        views = {str(view.run.path): view for view in view_runs(changed, warn=self._warn)}
        self.problem = next((view.problem for view in views.values() if view.problem), "")
        self.asked = min((x.asked for x in views.values() if x.asked is not None), default=None)
        rows: dict[str, RunRow] = {}
        deadline = time.monotonic() + self._budget_s
        for path, view in reversed(views.items()):
            if not is_over(view):
                rows[path] = self._read_live(path, view, now)
        for path, view in reversed(views.items()):
            if path not in rows:
                is_time = time.monotonic() < deadline
                rows[path] = self._judge_over(path, view, now, reads=is_time)
        for path, (_, row) in self._over.items():
            rows.setdefault(path, _age(row, now))
        paths = [str(run.path) for run in runs]
        removed = [_make_removed(one) for one in find_removed(index.list_removed(None))]
        return [*(rows[path] for path in paths if path in rows), *reversed(removed)]

    def _is_settled(self, run: RunFolder) -> bool:
        seen = self._over.get(str(run.path))
        return seen is not None and seen[0] == read_mtime(run.record)

    def _read_live(self, path: str, view: RunView, now: float) -> RunRow:
        self._over.pop(path, None)
        live = self._live.get(path)
        if live is None:
            live = self._live[path] = _LiveRun(view)
        return live.read(view, now)

    def _judge_over(self, path: str, view: RunView, now: float, *, reads: bool) -> RunRow:
        live = self._live.pop(path, None)
        if not reads and live is None:
            return replace(_make_row(view, now, None, None), is_read=False)
        mtime = read_mtime(view.run.record)
        row = (live or _LiveRun(view)).read(view, now)
        if row.verdict is not None and row.verdict.health in ENDED and now - mtime > LATE_S:
            self._over[path] = mtime, row
        return row


class _LiveRun:
    """Reader of one run that uses the scheduler's answer for all runs."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._reader: JudgedReader | None = None

    def read(self, view: RunView, now: float) -> RunRow:
        self._view = view
        try:
            if self._reader is None:
                name = view.record.scheduler
                desk = SchedulerDesk(
                    view.run, name, view=lambda run: self._view, watches_nodes=False
                )
                self._reader = JudgedReader(RunReader(view.run, num_lines=2, desk=desk))
            snapshot, verdict = self._reader.read()
        except (VjobError, OSError) as error:  # its folder went, or hides something
            return _make_row(view, now, None, None, str(error))
        return _make_row(view, now, snapshot, verdict)


def _make_row(
    view: RunView,
    now: float,
    snapshot: Snapshot | None,
    verdict: Verdict | None,
    problem: str = "",
) -> RunRow:
    record = view.record
    progress = snapshot.progress if snapshot is not None else None
    has_ended = is_over(view)
    has_left = (
        snapshot is not None and not has_ended and verdict is not None and verdict.makes_steps
    )
    return RunRow(
        run=record.run,
        name=record.name,
        folder=str(view.run.path),
        jobs=tuple(job.id for job in record.jobs),
        state=view.state,
        is_over=has_ended,
        submitted=record.submitted,
        age_s=max(0.0, now - record.submitted),
        verdict=verdict,
        message=problem or (verdict.reason if verdict is not None else record.message),
        attempt=snapshot.attempt if snapshot is not None else None,
        loss=progress.loss if progress is not None else None,
        losses=tuple(point.loss for point in progress.points) if progress is not None else (),
        step=progress.step if progress is not None else None,
        num_steps=progress.num_steps if progress is not None else None,
        step_s=find_finite(find_pace_s(snapshot)) if snapshot is not None else None,
        left_s=find_finite(find_left_s(snapshot)) if snapshot is not None and has_left else None,
    )


def _make_removed(removed: RemovedRun) -> RunRow:
    """Return the row of a run whose folder was removed and of which only the jobs are left."""
    return RunRow(
        run=removed.run,
        name=removed.run,
        folder="",
        jobs=tuple(removed.jobs),
        state=removed.infos[0].state.value,
        is_over=False,
        submitted=None,
        age_s=None,
        verdict=Verdict(
            health=Health.UNKNOWN, main=Finding("removed run"), reason=removed.explain()
        ),
        message=removed.explain(),
    )


def find_finite(value: float | None) -> float | None:
    """Return a finite number; None for NaN and infinity, which gauges and JSON lack."""
    return value if value is not None and math.isfinite(value) else None


def _age(row: RunRow, now: float) -> RunRow:
    return replace(row, age_s=max(0.0, now - (row.submitted or now)))

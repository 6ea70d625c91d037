"""Poll the states of all runs that a Python process waits for, with one query to each scheduler.

submitit asks sacct, which names het jobs differently and is not available everywhere. This watcher
uses the runs' own views (jobs/runs/find.py): one squeue for all runs that have not ended, and the
run folders. The interval grows as submitit's does (2 s, then half of the time since the last job
was registered, at most `delay_s`); a run whose ranks have just ended is polled at once.
"""

from __future__ import annotations

import time

from submitit.core.core import InfoWatcher

from varuna_core.records.formatting import fold_names
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.runs.find import RunView, is_over, view_runs

DELAY_S = 30
SOONEST_S = 2.0
"""Least seconds between two additional polls, which are made because the end of an attempt was
seen."""
SETTLE_S = 6.0
"""Seconds for which the end of an attempt causes additional polls, since an attempt writes its
outcome before its batch script ends."""


class VjobInfoWatcher(InfoWatcher):
    """Watcher that all jobs of this process share, as submitit's watchers are."""

    def __init__(self, delay_s: int = DELAY_S) -> None:
        super().__init__(delay_s)
        self._runs: dict[str, RunFolder] = {}
        self._views: dict[str, RunView] = {}
        self._ends: dict[str, tuple[float, float]] = {}
        """Time at which the outcome of a run's last attempt was written, and time at which it was
        first seen."""

    def register_run(self, job_id: str, run: RunFolder) -> None:
        """Watch a job of this run."""
        known = self._runs.get(job_id)
        if known is not None and known.path != run.path:  # another cluster's job of this id
            self._finished.discard(job_id)
            self._info_dict.pop(job_id, None)
            self._views.pop(job_id, None)
        self._runs[job_id] = run
        if job_id not in self._registered:
            self.register_job(job_id)

    def view(self, job_id: str) -> RunView | None:
        """Return the run's view of the last poll; None before the first."""
        return self._views.get(job_id)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode).get("State") or "UNKNOWN"

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return True once the end of the run is recorded. A final state of the scheduler is not
        enough, since a requeue may follow."""
        if job_id in self._finished:
            return True
        self.get_info(job_id, mode)
        return job_id in self._finished

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        since = time.time() - self._last_status_check
        if mode == "standard" and since > SOONEST_S and self._sees_an_end(job_id):
            mode = "force"
        found: dict[str, str] = super().get_info(job_id, mode)
        return found

    def update(self) -> None:
        """Poll all runs that have not ended, with at most one call of squeue."""
        live = {job: self._runs[job] for job in self._registered - self._finished}
        if not live:
            return
        self._num_calls += 1
        ends = {job: (self._find_end(run), time.time()) for job, run in live.items()}
        for job, (end, _) in ends.items():
            known = self._ends.get(job)
            if known is not None and known[0] == end:
                ends[job] = known
        self._ends = ends
        by_path = {str(view.run.path): view for view in view_runs(list(live.values()))}
        for job, run in live.items():
            view = by_path.get(str(run.path))
            if view is None:
                continue  # its record cannot be read just now
            self._views[job] = view
            self._info_dict[job] = _describe(job, view)
            if is_over(view):
                self._finished.add(job)
        self._last_status_check = time.time()

    def _sees_an_end(self, job_id: str) -> bool:
        if job_id in self._finished or job_id not in self._runs:
            return False
        known, seen = self._ends.get(job_id, (0.0, 0.0))
        end = self._find_end(self._runs[job_id])
        return end != known or (end > 0 and time.time() - seen < SETTLE_S)

    @staticmethod
    def _find_end(run: RunFolder) -> float:
        attempts = run.attempts()
        try:
            return attempts[-1].outcome.stat().st_mtime if attempts else 0.0
        except OSError:
            return 0.0


def _describe(job: str, view: RunView) -> dict[str, str]:
    """Describe a job with the field names of submitit's Slurm watcher."""
    return {
        "JobID": job,
        "State": view.state,
        "NodeList": ",".join(fold_names(info.nodes) for info in view.infos if info.nodes),
        "Reason": ", ".join(sorted({info.reason_text for info in view.infos} - {""})),
        "Message": view.record.message,
    }

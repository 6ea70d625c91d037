"""Polls the scheduler of a run in a thread, and never waits for it beyond a deadline.

A controller that hangs, or a squeue that hangs in the kernel on a dead mount, ends no refresh: the
last good answer is shown with its age. One question is under way at most. What it is told may be
some seconds old already: all viewers of a user share one answer (jobs/schedulers/broker.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varuna_core.facts.known import NotKnown
from varuna_core.records.formatting import fold_names
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import JobRow, Scheduler
from vjob.jobs.runs.find import RunView, view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.reasons import is_permanent

FIRST_S = 15.0
"""How long the first answer is waited for: without one there is nothing to show."""
LATER_S = 2.0
LOST_EVERY_S = 30.0
"""Between two questions about silent nodes."""


@dataclass(frozen=True)
class SchedulerAnswer:
    """The last answer of the scheduler."""

    view: RunView | None
    """None before the first one."""
    scheduler: Scheduler


class SchedulerDesk:
    """Polls the scheduler about one run."""

    def __init__(
        self,
        run: RunFolder,
        name: str,
        *,
        view: Callable[[RunFolder], RunView] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._name, self._now = run, name, now
        self._view = view or (lambda run: view_run(run, warn=False))
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._good: RunView | None = None
        self._last: RunView | None = None
        """With the record of now, also where the scheduler did not answer."""
        self._answered = 0.0
        self._problem = ""
        self._silent: tuple[str, ...] = ()
        self._lost: dict[str, str] = {}
        self._lost_asked = -LOST_EVERY_S
        self._error: BaseException | None = None

    def ask(self, silent_nodes: Sequence[str] = ()) -> None:
        """Begin a question, unless one is under way; `silent_nodes` gave no sign of life lately."""
        if self._thread is not None:
            return
        self._silent = tuple(silent_nodes)
        self._asked = self._now()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def answer(self) -> SchedulerAnswer:
        """The answer, or the last good one; raises what the first question raised."""
        if self._thread is not None:
            self._thread.join(FIRST_S if self._last is None else LATER_S)
            if self._thread.is_alive():
                waited = self._now() - self._asked
                self._problem = (
                    f"{self._name or 'the scheduler'} has not answered for {waited:.0f} s"
                )
            else:
                self._thread = None
        if self._error is not None and self._last is None:
            raise self._error
        return SchedulerAnswer(self._last, self._build_answer())

    def _build_answer(self) -> Scheduler:
        good = self._good
        return Scheduler(
            name=self._name,
            jobs=tuple(map(make_row, good.infos)) if good else (),
            joined=tuple(map(make_row, good.joined)) if good else (),
            age_s=0.0 if good is None else round(max(0.0, self._now() - self._answered), 1),
            problem=self._problem,
            lost_nodes=dict(self._lost),
        )

    def _work(self) -> None:
        """In the thread: fields are set once the answer is whole."""
        try:
            view = self._view(self._run)
            lost = self._lost
            if self._silent and self._now() - self._lost_asked >= LOST_EVERY_S:
                self._lost_asked = self._now()
                lost = schedulers.get_scheduler(view.record.scheduler).find_lost_nodes(self._silent)
            elif not self._silent:
                lost = {}
        except VjobError as error:
            self._problem, self._error = str(error), error
            return
        except Exception as error:  # a bug here must not end the screen, nor pass unseen
            self._problem, self._error = f"{type(error).__name__}: {error}", error
            return
        self._name = self._name or view.record.scheduler
        self._last, self._problem, self._lost = view, view.problem, lost
        if not view.problem:
            age_s = 0.0 if view.asked is None else max(0.0, time.time() - view.asked)
            self._good, self._answered = view, self._now() - age_s


def make_row(info: SchedulerJob) -> JobRow:
    """A job as the snapshot has it."""
    waits = info.state is JobState.PENDING and not is_permanent(info)
    return JobRow(
        id=info.id,
        state=info.state.value,
        word=info.native_word,
        nodes=fold_names(info.nodes),
        # Slurm keeps why a job waited while it runs.
        reason="" if info.state is JobState.RUNNING else info.reason_text,
        # Slurm expects a start of what can never start, too.
        start=_format_date(info.start) if waits and info.start is not None else "",
        restarts=info.restarts,
        exit_code=info.exit_text,
        left_s=None if isinstance(info.left, NotKnown) else info.left.value,
    )


def _format_date(at: float) -> str:
    """Local time, `2026-11-23T13:18:48`."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))

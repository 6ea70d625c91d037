"""Poll the scheduler of a run in a thread, and never wait for the answer beyond a deadline.

A controller or a squeue that hangs does not block a refresh: the last good answer is shown with its
age. At most one query is in progress. An answer may already be some seconds old, since all viewers
of a user share one answer (jobs/schedulers/broker.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import NodeCondition, NodeState
from varuna_core.facts.known import NotKnown, Value
from varuna_core.records.formatting import fold_names
from varuna_core.records.record import ENDED, RunRecord
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import JobRow, Scheduler
from vjob.jobs.monitor.rules.waiting import RECENT_S
from vjob.jobs.runs.find import RunView, list_earlier, view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.reasons import find_reason, is_permanent

FIRST_S = 15.0
"""Seconds to wait for the first answer, without which there is nothing to show."""
LATER_S = 2.0
LOST_EVERY_S, NODES_EVERY_S = 30.0, 120.0
"""Seconds between two queries about a job's nodes: while some nodes are silent, and otherwise."""


NOT_STARTED = (JobState.PENDING, JobState.REQUEUED, JobState.CONFIGURING)
"""States in which the start time is only an estimate."""


class SchedulerDesk:
    """Polls the scheduler for the state of one run."""

    def __init__(
        self,
        run: RunFolder,
        name: str,
        *,
        view: Callable[[RunFolder], RunView] | None = None,
        watches_nodes: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """If `watches_nodes` is false, query the scheduler only about nodes that are silent."""
        self._run, self._name, self._now = run, name, now
        self._watches_nodes = watches_nodes
        self._view = view or self._view_recently
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._good: RunView | None = None
        self._last: RunView | None = None
        """The last view with the present record, even if the scheduler did not answer."""
        self._answered = 0.0
        self._problem = ""
        self._silent: tuple[str, ...] = ()
        self._nodes: tuple[NodeState, ...] = ()
        self._nodes_asked = float("-inf")
        self._earlier: dict[str, tuple[EndCause, ...]] = {}
        self._error: BaseException | None = None

    def ask(self, silent_nodes: Sequence[str] = ()) -> None:
        """Start a query unless one is in progress; the heartbeats of `silent_nodes` are late."""
        if self._thread is not None:
            return
        self._silent = tuple(silent_nodes)
        self._asked = self._now()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def answer(self) -> tuple[RunView | None, Scheduler]:
        """Return the run's view, None before the first answer, and what the scheduler said, or else
        said last; raise the error of a failed first query."""
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
        return self._last, self._build_answer()

    def _build_answer(self) -> Scheduler:
        good = self._good
        return Scheduler(
            name=self._name,
            jobs=self._list_rows(good) if good else (),
            joined=tuple(map(make_row, good.joined)) if good else (),
            age_s=0.0 if good is None else round(max(0.0, self._now() - self._answered), 1),
            problem=self._problem,
            lost_nodes={
                one.name: format_node(one)
                for one in self._nodes
                if one.condition is NodeCondition.LOST
            },
            node_states=self._nodes,
        )

    def _list_rows(self, view: RunView) -> tuple[JobRow, ...]:
        """Return the jobs of the run; those that the scheduler forgot come from the record."""
        groups = {job.id: job.group or "" for job in view.record.jobs}
        rows = tuple(map(make_row, view.infos)) or recall_rows(view.record)
        return tuple(
            replace(
                row,
                group=groups.get(row.id.partition("+")[0], ""),
                earlier=row.earlier or tuple(x.value for x in self._earlier.get(row.id, ())),
            )
            for row in rows
        )

    def _ask_earlier(self, view: RunView) -> dict[str, tuple[EndCause, ...]]:
        """Return the ends of the jobs' earlier starts; accounting is asked once for each start."""
        if all(info.restarts <= len(self._earlier.get(info.id, ())) for info in view.infos):
            return self._earlier
        return list_earlier(view.run, view.record, view.infos)

    def _ask_nodes(self, view: RunView) -> tuple[NodeState, ...]:
        """Return the states of the run's nodes; the previous ones if no query is due."""
        running = [info for info in (*view.infos, *view.joined) if info.state is JobState.RUNNING]
        held = dict.fromkeys(name for info in running for name in info.nodes)
        names = list(held) if self._watches_nodes and held else list(self._silent)
        if not names:
            return ()
        floor_s = LOST_EVERY_S if self._silent else NODES_EVERY_S
        if self._now() - self._nodes_asked < floor_s:
            return self._nodes
        self._nodes_asked = self._now()
        scheduler = schedulers.get_scheduler(view.record.scheduler)
        return tuple(scheduler.ask_node_states(names, floor_s=floor_s))

    def _view_recently(self, run: RunFolder) -> RunView:
        """Return the run's view. Of a job that never starts by itself, the first answer is a new
        one, since the user may just have changed the job."""
        view = view_run(run, warn=False)
        if self._last is None and any(map(is_permanent, view.infos)):
            return view_run(run, warn=False, after=time.time() - RECENT_S)
        return view

    def _work(self) -> None:
        """Run the query in the thread, setting the fields once the answer is complete."""
        try:
            view = self._view(self._run)
            nodes, earlier = self._ask_nodes(view), self._ask_earlier(view)
        except VjobError as error:
            self._problem, self._error = str(error), error
            return
        except Exception as error:  # a bug here must not end the screen, nor pass unseen
            self._problem, self._error = f"{type(error).__name__}: {error}", error
            return
        self._name = self._name or view.record.scheduler
        self._last, self._problem, self._nodes = view, view.problem, nodes
        self._earlier = earlier
        if not view.problem:
            age_s = 0.0 if view.asked is None else max(0.0, time.time() - view.asked)
            self._good, self._answered = view, self._now() - age_s


def recall_rows(record: RunRecord) -> tuple[JobRow, ...]:
    """Return the jobs of a run that is over from its record; an old record has only their ids."""
    if record.state != ENDED:
        return ()
    if not record.job_ends:
        state = record.verdict if len(record.jobs) == 1 else JobState.UNKNOWN.value
        return tuple(JobRow(id=job.id, state=state, word=state) for job in record.jobs)
    return tuple(
        JobRow(
            id=one.id,
            state=one.state,
            word=one.word,
            nodes=one.nodes,
            reason=one.reason,
            restarts=one.restarts,
            exit_code=one.exit_code,
            limit_s=one.limit_s,
            started=one.started,
            ends=one.ended,
            earlier=tuple(one.earlier.split()),
        )
        for one in record.job_ends
    )


def format_node(state: NodeState) -> str:
    """Format a node's state and reason: `down+not_responding (Not responding)`."""
    return f"{state.word} ({state.reason})" if state.reason else state.word


def make_row(info: SchedulerJob) -> JobRow:
    """Convert a scheduler's job to a row of the snapshot."""
    is_pending = info.state is JobState.PENDING
    waits = is_pending and not is_permanent(info)
    reason = find_reason(info.reason_text) if is_pending else None
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
        end_cause="" if info.end_cause is None else info.end_cause.value,
        left_s=None if isinstance(info.left, NotKnown) else info.left.value,
        limit_s=info.limit.value if isinstance(info.limit, Value) else None,
        started=None if info.state in NOT_STARTED else info.start,
        ends=None if info.state in NOT_STARTED else info.ends,
        preempted=info.preempted,
        waiting=reason.waits.value if reason is not None and reason.waits is not None else "",
        dependency=info.dependency if info.state is JobState.PENDING else "",
    )


def _format_date(at: float) -> str:
    """Format a time as local time, `2026-11-23T13:18:48`."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))

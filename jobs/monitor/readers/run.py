"""Reader of a run: its record, its scheduler, its attempts and the disks it writes to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value
from varuna_core.records import record as records
from varuna_core.records.checkpoints import Damaged, Newest, find_newest, list_damaged
from varuna_core.records.exits import read_reason
from varuna_core.records.files import read_lines
from varuna_core.records.morphing import (
    ENDED,
    GATHERING,
    JUDGING,
    RUNNING,
    SAVING,
    STOPPING,
    ManagerState,
    get_seat,
    read_state,
)
from varuna_core.records.plan import Plan, read_attempt_plan, read_plan
from varuna_core.records.record import (
    RunRecord,
    format_commit,
    format_morph,
    read_record,
    read_restarts,
    read_run_end,
)
from varuna_core.records.runfolder import OPENED, AttemptFolder, RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.log_lines.errors import Classifier
from vjob.jobs.monitor.model.snapshot import (
    Attempt,
    AttemptView,
    Disk,
    NewFiles,
    Node,
    Scheduler,
    Snapshot,
)
from vjob.jobs.monitor.readers.attempt import AttemptReader
from vjob.jobs.monitor.readers.file_systems import Skew, probe, read_disks
from vjob.jobs.monitor.readers.node_files import count_lines, merge_errors
from vjob.jobs.monitor.readers.node_logs import LogFile
from vjob.jobs.monitor.readers.scheduler import SchedulerDesk
from vjob.jobs.monitor.readers.settings import compare, read_asked, take_first
from vjob.jobs.monitor.rules.base import format_names
from vjob.jobs.runs.find import RunView, name_host
from vjob.jobs.runs.new_files import find_new_files
from vjob.jobs.runs.owner import is_ours, name_owner
from vjob.jobs.schedulers.reasons import explain_reason

SLOW_EVERY_S = 10.0
"""Seconds between two reads of disks and checkpoints."""
NUM_SCHEDULER_LINES = 8
NUM_EARLIER = 8
"""Number of last earlier attempts whose steps are read."""
MAX_SILENT = 64
MORPHING = (GATHERING, SAVING, STOPPING, JUDGING)
"""Phases of the manager of a run that may morph (varuna_core/records/morphing.py)."""


@dataclass(frozen=True)
class StorageReader:
    """Checkpoints and free space, as last read."""

    disks: tuple[Disk, ...] = ()
    newest: Newest | None = None
    damaged: tuple[Damaged, ...] = ()


class RunReader:
    """Incremental reader of snapshots of one run."""

    def __init__(
        self,
        run: RunFolder,
        *,
        num_lines: int = 10,
        desk: SchedulerDesk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        record = read_record(run)
        if record is None:
            raise InputError(
                f"{run.path} holds no readable record.json; is it a run folder of vjob?"
            )
        self._num_lines, self._clock = num_lines, clock
        self._plan = read_plan(run.plan)
        self._lacks_plan = False
        """True while the last attempt's own plan has not been written yet."""
        self._asked = read_asked(run, self._plan)
        self._desk = desk or SchedulerDesk(run, record.scheduler)
        self._skew = Skew()
        offset = probe(run.path) if record.state == records.SUBMITTED else None
        if offset is not None:
            self._skew.note_probe(offset)
        self._scripts: dict[str, LogFile] = {}
        self._classifier = Classifier()
        self._attempt: AttemptReader | None = None
        self._earlier: dict[int, Attempt] = {}
        self._store, self._store_at = StorageReader(), float("-inf")
        self._silent: tuple[str, ...] = ()
        self._new_files: NewFiles | None = None
        self._has_new_files = False

    def read(self) -> Snapshot:
        """Return a snapshot of the run's present state."""
        self._desk.ask(self._silent)
        attempts = self.run.attempts()
        shown = self._read_attempt(attempts)
        self._read_scripts()
        now = self._note_time()
        self._read_store(now)
        view, scheduler = self._desk.answer()
        record = (view.record if view is not None else None) or read_record(self.run)
        assert record is not None, "record.json existed when the reader was opened"
        self._silent = self._find_silent(shown.nodes, now) if _is_live(record) else ()
        plan, store, newest = self._plan, self._store, self._store.newest
        manager = read_state(self.run.morph) if plan is not None and plan.morph else None
        if newest is not None and newest.is_of_other(self.run.name, record.submitted):
            newest = None
        progress = shown.progress
        may_resume = len(attempts) > 1 or self._asked.checkpoints is not None
        is_later = progress is not None and progress.is_counted and may_resume
        is_other = progress is not None and progress.unit != "step"
        if progress is None or progress.num_steps is not None or is_later or is_other:
            pass  # the conf's number is not one of this attempt's steps
        elif self._asked.num_steps:
            progress = replace(progress, num_steps=self._asked.num_steps, is_asked=True)
        files = self._attempt.files if self._attempt is not None else {}
        logs = (files[node.name] for node in shown.nodes if node.name in files)
        echoes = compare(logs, self._asked.wanted)
        limit = find_limit(view, self._asked.walltime_s)
        told: dict[str, Any] = {
            **vars(shown),
            "progress": progress,
            "errors": shown.errors + merge_errors(self._scripts.values()),
            "outcome": record.outcome or shown.outcome,
        }
        return Snapshot(
            **told,
            now=now,
            run=record.run,
            folder=str(self.run.path),
            state=view.state if view is not None else "UNKNOWN",
            record_state=record.state,
            record_verdict=record.verdict,
            end=read_run_end(self.run, record),
            message=_explain(record, view, scheduler, shown) or self._explain_closed(attempts),
            layout=record.layout,
            after=tuple(Path(path).name for path in record.after),
            after_any=tuple(Path(path).name for path in record.after_any),
            commit=format_commit(record.code),
            submitted=record.submitted,
            walltime_s=limit.value if isinstance(limit, Value) else None,
            time_limit=limit,
            warn_s=record.limits.warn_s if record.limits is not None else 0.0,
            comes_back=plan is not None and plan.morphing is not None and plan.morphing.requeue,
            scheduler=scheduler,
            attempt=attempts[-1].number if attempts else None,
            earlier=add_causes(self._read_earlier(attempts[:-1]), scheduler, plan),
            restarts=self._count_restarts(),
            max_restarts=None if plan is None or plan.morph else plan.restarts,
            morph=_describe_morph(manager, shown) if _is_live(record) else "",
            waits_for_room=self._read_room(manager) if _is_live(record) else "",
            left_out=self._list_left_out(manager),
            morphs=self._read_morphs(),
            world=plan.world if plan else None,
            num_nodes=plan.num_nodes if plan else None,
            echoes=echoes,
            info=take_first(echoes),
            checkpoint_step=newest.step if newest else None,
            checkpoint_at=newest.written if newest else None,
            damaged=store.damaged,
            disks=store.disks,
            new_files=self._read_new_files(record),
            clock_skew_s=self._skew.worth_saying,
            scheduler_lines=tuple(
                line
                for _, log in sorted(self._scripts.items())
                for line in log.last_lines(NUM_SCHEDULER_LINES)
            ),
            num_gpus=sum(x.gpus * x.count for x in plan.groups) if plan else None,
        )

    def count_lines(self, nodes: Collection[str]) -> Mapping[str, Mapping[str, int]]:
        return count_lines(self._attempt.files if self._attempt else {}, nodes)

    def _read_attempt(self, attempts: list[AttemptFolder]) -> AttemptView:
        if not attempts:
            self._attempt = None
            return AttemptView()
        last = attempts[-1]
        read = self._attempt
        if read is None or read.attempt.number != last.number or self._lacks_plan:
            own = read_attempt_plan(self.run, last.number)
            self._plan = own or read_plan(self.run.plan)
            self._lacks_plan = own is None and self._plan is not None
            self._asked = read_asked(self.run, self._plan, last)
            self._attempt = AttemptReader(last, self._plan, self._num_lines)
            return self._attempt.read()
        opened = read.opened
        shown = read.read()
        if opened is not None and opened != read.opened:  # another try, in the same place
            self._attempt = AttemptReader(last, self._plan, self._num_lines)
            shown = self._attempt.read()
        return shown

    def _note_time(self) -> float:
        """Return the present time by the file server's clock."""
        ours = self._clock()
        self._skew.note(self._attempt.newest if self._attempt else None, ours)
        return ours + self._skew.offset_s

    def _explain_closed(self, attempts: list[AttemptFolder]) -> str:
        if not attempts or os.access(attempts[-1].path, os.R_OK | os.X_OK):
            return ""
        owner, number = name_owner(self.run.path), attempts[-1].number
        return (
            f"attempt {number} is not shared yet: ask {owner} to run again: "
            f"vjob share {self.run.path} --group G"
        )

    def _read_store(self, now: float) -> None:
        if abs(now - self._store_at) < SLOW_EVERY_S:
            return
        self._store_at = now
        folders = {"logs": self.run.path}
        newest, damaged = None, []
        if self._asked.checkpoints is not None:
            folders["checkpoints"] = self._asked.checkpoints
            newest = find_newest(self._asked.checkpoints)
            damaged = list_damaged(self._asked.checkpoints)
        self._store = StorageReader(read_disks(folders), newest, tuple(damaged))

    def _read_new_files(self, record: RunRecord) -> NewFiles | None:
        """Look for new files once, when the run is over and its folder no longer changes."""
        if record.state == records.ENDED and not self._has_new_files:
            self._new_files, self._has_new_files = find_new_files(self.run), True
        return self._new_files

    def _read_room(self, manager: ManagerState | None) -> str:
        """Return the full folder whose space the next attempt waits for; empty if there is none."""
        if manager is not None:
            return manager.room if manager.phase == GATHERING else ""
        last: Any = {}
        if self._plan is not None and self._plan.restarts and not self._plan.morph:
            events = [one for one in read_lines(self.run.events()) if isinstance(one, dict)]
            last = events[-1] if events else {}
        return str(last.get("folder", "")) if last.get("kind") == records.NO_ROOM else ""

    def _list_left_out(self, manager: ManagerState | None) -> tuple[str, ...]:
        if manager is None:
            return ()
        left_out = manager.left_out
        spare = [name_host(self.run, seat) for seat in list_spare(manager)]
        if spare:
            names = format_names(spare)
            left_out += (f"present but not used: {names}; the layout has no place for more",)
        return left_out

    def _read_morphs(self) -> tuple[str, ...]:
        if self._plan is None or not self._plan.morph:
            return ()
        events = read_lines(self.run.morph_events)
        return tuple(
            format_morph(event)
            for event in events
            if isinstance(event, dict) and event.get("kind") == "morph"
        )

    def _count_restarts(self) -> int:
        if self._plan is None or not self._plan.restarts or self._plan.morph:
            return 0
        return len(read_restarts(self.run))

    def _find_silent(self, nodes: tuple[Node, ...], now: float) -> tuple[str, ...]:
        """Return nodes whose heartbeats are late, about which the scheduler is asked."""
        least_s = self._plan.timing.beat_s if self._plan else 10.0

        def is_late(node: Node) -> bool:
            every_s = max(node.beat_every_s or least_s, least_s)
            late_s = max(30.0, every_s + 3 * least_s)
            return node.beat_at is None or now - node.beat_at > late_s

        phases = ("ready", "running")
        silent = [node.name for node in nodes if node.phase in phases and is_late(node)]
        return tuple(silent[:MAX_SILENT])

    def _read_earlier(self, attempts: list[AttemptFolder]) -> tuple[Attempt, ...]:
        for at, attempt in enumerate(attempts):
            if attempt.number in self._earlier:
                continue
            reason = read_reason(attempt) or "ended silently: requeued, or its host was lost"
            progress = None
            if at >= len(attempts) - NUM_EARLIER:
                plan = read_attempt_plan(self.run, attempt.number)
                progress = AttemptReader(attempt, plan, 0).read().progress
            self._earlier[attempt.number] = Attempt(
                number=attempt.number, reason=reason, step=progress.step if progress else None
            )
        return tuple(self._earlier[attempt.number] for attempt in attempts)

    def _read_scripts(self) -> None:
        """Read the output of the batch scripts, where srun and slurmstepd write."""
        for path in self.run.batch_logs():
            if path.name not in self._scripts:
                self._scripts[path.name] = LogFile(
                    path, "", path.name, self._classifier, begin=OPENED.encode()
                )
        for log in self._scripts.values():
            log.poll()


def add_causes(
    earlier: tuple[Attempt, ...], scheduler: Scheduler, plan: Plan | None
) -> tuple[Attempt, ...]:
    """Add the scheduler's end cause of each start to the attempts, if each start is one attempt."""
    causes = scheduler.jobs[0].earlier if scheduler.jobs else ()
    if plan is None or plan.restarts or plan.morph:
        return earlier
    return tuple(
        replace(one, cause=causes[one.number]) if one.number < len(causes) else one
        for one in earlier
    )


def _is_live(record: RunRecord) -> bool:
    return record.state == records.SUBMITTED


def _explain(
    record: RunRecord, view: RunView | None, scheduler: Scheduler, shown: AttemptView
) -> str:
    """Return a sentence about the run's state; empty if there is nothing to say."""
    infos = view.infos if view is not None else ()
    said = record.message or explain_reason(infos)
    if said:
        return said
    if record.state == records.SUBMITTED and not infos and not scheduler.problem:
        if view is not None and not is_ours(view.run):
            owner = name_owner(view.run.path)
            return f"{record.scheduler} does not show the job, which belongs to {owner}"
        return f"{record.scheduler} no longer knows the job; last lines below"
    if shown.stop is not None and shown.outcome is None:
        return f"ending: {shown.stop.get('reason')}"
    return ""


def _describe_morph(manager: ManagerState | None, shown: AttemptView) -> str:
    """Describe a morphing run's change of nodes between attempts; empty if there is none."""
    has_failed = any(rank.exit is not None and rank.exit.code for rank in shown.ranks)
    is_ending = shown.stop is not None or has_failed
    return "" if manager is None else format_going(manager, is_ending=is_ending)


def format_going(state: ManagerState, *, is_ending: bool) -> str:
    """Describe from which nodes to which a run changes; empty if it does not change now."""
    is_back = state.phase == GATHERING and not state.members and state.attempt >= 0
    if is_back or (state.phase == ENDED and state.requeue):  # its last attempt is not its end
        return "the nodes of its last start to the nodes of its next start"
    if not state.members:
        return ""
    if state.phase in MORPHING:
        return f"{len(state.members)} nodes to {len(state.nodes)}"
    if state.phase == RUNNING and is_ending:
        return f"{len(state.members)} nodes to the remaining nodes"
    return ""


def list_spare(state: ManagerState) -> list[int]:
    """Return the seats of nodes that are present and take no part in the running attempt."""
    if state.phase != RUNNING:
        return []
    return sorted(get_seat(node) for node in state.nodes if node not in state.members)


def find_limit(view: RunView | None, asked_s: float | None) -> Known[float]:
    """Return the time limit that the scheduler reports or has reported, according to the record;
    else the requested one."""
    limits = [info.limit for info in view.infos] if view is not None else []
    for limit in limits:
        if isinstance(limit, Value):
            return limit
    kept = [one.limit_s for one in view.record.job_ends] if view is not None else []
    for limit_s in kept:
        if limit_s is not None:
            return Value(limit_s, (Evidence("record.json"),))
    if asked_s is not None:
        return Value(asked_s, (Evidence("conf", Sure.INFERRED, text="as it was submitted"),))
    return limits[0] if limits else NotKnown("the job has no time limit, or an unknown one")

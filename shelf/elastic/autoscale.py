"""Autoscaler of an elastic run (`vjob tend`): requests more nodes, and removes slow ones.

    batch script ─► vjob tend ─┬─ idle nodes (sinfo), pace, pause ─► growth.py ─► as `vjob grow`
    (or a terminal)            ├─ own pending job, no longer worth it ────────────► cancelled
                               └─ ranks' times ─► growth.py ──────────────────► morph/leave

The keys under `morph` in the conf set what the autoscaler may do. It is not a part of the manager,
which knows no scheduler: it makes requests by the same files as a user's commands, and a run
continues without it. It polls every `morph.look_s`, and asks about the jobs once a minute at most;
it calls sinfo as rarely, and only if more nodes would be worth a morph (a change of the layout).
"""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from varuna_core.facts.known import Value
from varuna_core.records import record as records
from varuna_core.records.files import lock_file, read_lines
from varuna_core.records.logs.slow_ranks import WARM_UP_STEPS
from varuna_core.records.morphing import (
    ENDED,
    RUNNING,
    ManagerState,
    add_joins,
    get_seat,
    read_join_job,
    read_joins,
    read_state,
)
from varuna_core.records.plan import Plan, read_attempt_plan, read_facts, read_plan
from varuna_core.records.rank_map import locate_ranks
from varuna_core.records.record import append_event, read_pause_s
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.elastic import membership
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.model.snapshot import Progress, is_time
from vjob.jobs.monitor.readers.attempt import AttemptReader
from vjob.jobs.runs.find import RunView, cancel_joined, find_joined_over, view_run
from vjob.jobs.runs.owner import expect_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.base import SELDOM_S, Scheduler
from vjob.jobs.schedulers.job import JobState, list_fitting
from vjob.jobs.schedulers.node_names import expand_nodes
from vjob.shelf.elastic.growth import (
    Pause,
    Standing,
    choose_growth,
    choose_leaving,
    compute_pause,
    find_slow_nodes,
    format_basis,
    still_pays,
)

RECENT_STEPS = 50
ENOUGH_POINTS = 5
"""Least number of log lines, or steps of a trace, to judge by."""
ENOUGH_STEPS = 10


def find_recent_step_s(progress: Progress | None) -> float | None:
    """Return the median time of the last steps; None while there are few."""
    if progress is None or not progress.points:
        return None
    first = progress.first_step if progress.first_step is not None else progress.points[0].step
    last = progress.points[-1].step
    used = [
        point.step_s
        for point in progress.points
        if is_time(point.step_s)
        if point.step >= max(first + WARM_UP_STEPS, last - RECENT_STEPS)
    ]
    if len(used) < ENOUGH_POINTS or last - first - WARM_UP_STEPS < ENOUGH_STEPS:
        return None
    return statistics.median(used)


def list_peers(plan: Plan, devices: dict[int, str]) -> list[list[int]]:
    """Group ranks by place in the pipeline (and so by all their stages) and by device."""
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, found in sorted(locate_ranks(plan.stage_map, plan.tensor).items()):
        groups.setdefault((found.place, devices.get(rank, "")), []).append(rank)
    return list(groups.values())


LONGEST_WAIT_S = 3600.0
"""Longest wait in seconds between requests for nodes, after requested jobs that were of no use."""
LONGEST_PENDING_S = 600.0
"""Seconds that a requested job may wait, since its nodes were idle at the request."""
SPARE_MIN = 2
"""Minutes that a joining job asks for beyond the remaining time of the run."""


class Autoscaler:
    """Adds nodes to a run, and drops slow ones."""

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        plan = read_plan(run.plan)
        if plan is None or plan.morphing is None:
            raise InputError(f"the nodes of {run.name} cannot change, so vjob tend is useless")
        self._run, self._plan, self._say = run, plan, say
        self._most, self._fewest = plan.morphing.max_nodes, plan.morphing.min_nodes
        self._facts = read_facts(run, plan)
        self.conf = membership.read_submitted(run)
        self._reader: AttemptReader | None = None
        self._told = ""

    def poll(self) -> bool:
        """Evaluate the run once, and act; return False once the run is over."""
        view = view_run(self._run, warn=False, floor_s=SELDOM_S)
        if view.record.state not in (records.INTENT, records.SUBMITTED):
            return False
        if view.problem:
            self._tell(f"nothing is changed for now: {view.problem}")
            return True
        state = read_state(self._run.morph)
        if state is None or state.phase != RUNNING or not view.infos:
            return state is None or state.phase != ENDED or state.requeue
        scheduler = schedulers.get_scheduler(view.record.scheduler)
        standing = self._find_standing(view, state, scheduler)
        if standing is None:
            return True
        self._withdraw(view, standing)
        if self.conf.morph.leave_slow and self._leave_slow(standing, state):
            return True  # a morph is coming
        if self.conf.morph.grow == "auto":
            self._grow(view, standing, scheduler)
        return True

    def _find_standing(
        self, view: RunView, state: ManagerState, scheduler: Scheduler
    ) -> Standing | None:
        """Return pace and outlook of the run; None until the attempt has done enough steps."""
        number = state.attempt
        if self._reader is None or self._reader.attempt.number != number:
            plan = read_attempt_plan(self._run, number)
            if plan is None:
                return None
            self._reader = AttemptReader(self._run.attempt(number), plan, 0)
        progress = self._reader.read().progress
        pace_s = find_recent_step_s(progress)
        if progress is None or pace_s is None:
            return None
        steps = self._facts.steps or progress.num_steps
        steps_left = math.inf if steps is None else steps - progress.points[-1].step
        if steps_left <= 0:
            return None
        going = membership.read_leaving(self._run)
        here = sorted(set(map(get_seat, state.nodes)) - going)
        left = scheduler.ask_time_left(view.record.jobs[0].id)
        return Standing(
            plan=add_joins(self._plan, read_joins(self._run.morph)),
            facts=self._facts,
            here=tuple(here),
            steps_left=steps_left,
            step_s=pace_s,
            pause=self._compute_pause(),
            left_s=left.value if isinstance(left, Value) else math.inf,
        )

    def _compute_pause(self) -> Pause:
        events = read_lines(self._run.morph_events)
        pauses = [read_pause_s(e) for e in events if is_event(e, "morph")]
        return compute_pause([pause for pause in pauses if pause is not None])

    # More nodes.

    def _grow(self, view: RunView, standing: Standing, scheduler: Scheduler) -> None:
        members = membership.read_members(view, self._plan)
        room = self._most - members.count
        if room < 1 or any(join.by_itself for join in members.waiting) or self._is_early(view):
            return
        if not self._is_wanted():
            self._tell("`vjob shrink` turned automatic growth off; `vjob grow` turns it on")
            return
        groups = [g for g in self._plan.groups if membership.choose_group(self._plan, g.queue) == g]
        if choose_growth(standing, room, {group.name: room for group in groups}) is None:
            self._tell(f"more nodes would not be worth {standing.pause}")
            return
        nodes = scheduler.find_idle([group.queue for group in groups])
        excluded = {*members.hosts.values(), *membership.read_slow_hosts(self._run)}
        excluded.update(name for text in self.conf.cluster.exclude for name in expand_nodes(text))
        idle = {group.name: len(list_fitting(nodes, group, excluded)) for group in groups}
        offer = choose_growth(standing, room, idle)
        if offer is None:
            few = sum(idle.values())
            self._tell(f"{few or 'no'} idle nodes fit" + (", too few to be useful" * (few > 0)))
            return
        why = (
            f"{offer.count} more node{'s' * (offer.count > 1)}: about {offer.then_s:.3g} s a step "
            f"({format_basis(is_predicted=offer.is_predicted)}), now {standing.step_s:.3g} s; "
            f"this is worth {standing.pause}"
        )
        _, job = membership.grow(
            self._run,
            count=offer.count,
            queue=offer.group.queue,
            walltime_min=self._compute_walltime_min(standing.left_s),
            why=why,
        )
        self._tell(f"job {job} will bring {why}")

    def _compute_walltime_min(self, left_s: float) -> int | None:
        """Return the time limit in minutes of a job that joins the run: little more than the run's
        remaining time, so that the job starts sooner; None, for the run's own limit, if the run may
        be requeued or its remaining time is not limited."""
        cluster = self.conf.cluster
        if cluster.requeue or math.isinf(left_s):
            return None
        wanted_min = math.ceil(left_s / 60) + SPARE_MIN
        return min(cluster.walltime_min or wanted_min, wanted_min)

    def _is_wanted(self) -> bool:
        """Return True unless a user's last request was for fewer nodes."""
        asked = [
            event["kind"]
            for event in read_lines(self._run.vjob_events)
            if is_event(event, "grow-asked", "shrink-asked") and not event.get("why")
        ]
        return not asked or asked[-1] == "grow-asked"

    def _is_early(self, view: RunView) -> bool:
        """Return True if the last request for nodes is too recent: the wait doubles with each
        joined job that is already over."""
        over = find_joined_over(view)
        own = [join for join in read_joins(self._run.morph) if join.by_itself]
        failed = sum(1 for join in own if join.number in over)
        wait_s = min(self.conf.morph.look_s * 2.0**failed, LONGEST_WAIT_S)
        return bool(own) and failed > 0 and time.time() - own[-1].asked < wait_s

    def _withdraw(self, view: RunView, standing: Standing) -> None:
        """Cancel our waiting jobs that are not worth a morph any more or whose nodes are taken."""
        states = {info.leader: info.state for info in view.joined}
        for join in read_joins(self._run.morph):
            said = read_join_job(self._run.morph, join)
            if not join.by_itself or said is None or said.job is None:
                continue
            if states.get(said.job) is not JobState.PENDING:
                continue
            waited_s = time.time() - join.asked
            why = ""
            if not still_pays(standing, join.seats):
                why = f"the new nodes would no longer be worth {standing.pause}"
            elif waited_s > LONGEST_PENDING_S:
                why = f"after {waited_s / 60:.0f} min in the queue, other jobs have its nodes"
            if why:
                cancel_joined(view, [join])
                append_event(self._run.vjob_events, "withdrawn", group=join.name, why=why)
                self._tell(f"job {said.job}, which had not started, is cancelled: {why}")

    # Fewer.

    def _leave_slow(self, standing: Standing, state: ManagerState) -> bool:
        """Ask slow nodes to leave; True if any was asked."""
        assert self._reader is not None and self._reader.plan is not None
        plan, traces = self._reader.plan, self._reader.traces.ranks
        members = list(map(get_seat, state.members))
        nodes = [plan.node_of_rank(rank).index for rank in range(plan.world)]
        if len(members) <= max(nodes, default=-1):
            return False  # of another attempt
        steps_s = {rank: trace.medians()[0] for rank, trace in traces.items()}
        found = find_slow_nodes(
            {rank: trace.works_s() for rank, trace in traces.items()},
            list_peers(plan, {rank: trace.device for rank, trace in traces.items()}),
            {rank: members[index] for rank, index in enumerate(nodes)},
            {rank: step_s for rank, step_s in steps_s.items() if step_s is not None},
        )
        slow = [node for node in found if node.seat in standing.here]
        parting = choose_leaving(standing, slow, self._fewest)
        if parting is None:
            if slow:
                self._tell(
                    f"node {slow[0].seat} is slow but stays: no layout without it is worth "
                    f"{standing.pause}; {slow[0]}"
                )
            return False
        for node in slow:
            if node.seat in parting.seats:
                basis = format_basis(is_predicted=parting.is_predicted)
                why = f"{node}; without it about {parting.then_s:.3g} s a step ({basis}), now "
                why += f"{standing.step_s:.3g} s"
                membership.leave_out(self._run, node.seat, why)
                self._tell(f"node {node.seat} is asked to leave: {why}")
        return True

    def _tell(self, text: str) -> None:
        """Print a text, but only once in a row."""
        if text != self._told:
            self._told = text
            self._say(text)


def is_event(value: Any, *kinds: str) -> bool:
    return isinstance(value, dict) and value.get("kind") in kinds


@contextlib.contextmanager
def _hear_signals() -> Iterator[threading.Event]:
    """Set an event on a signal that ends this process; restore the handlers afterwards."""
    left = threading.Event()
    before = {
        number: signal.signal(number, lambda number, frame: left.set())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        yield left
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_autoscaler(run: RunFolder, say: Callable[[str], None]) -> int:
    """Poll until the run ends or a signal comes; one process for each run."""
    expect_ours(run, "only the run's owner may change its nodes")
    autoscaler = Autoscaler(run, say)
    morph = autoscaler.conf.morph
    if morph.grow == "none" and not morph.leave_slow:
        raise InputError(f"{run.name}: neither morph.grow nor morph.leave_slow was asked for")
    run.morph.make()
    with _hear_signals() as left, lock_file(run.morph.tend_lock, waits=False) as is_ours:
        if not is_ours:
            say(f"another `vjob tend` is running for {run.name}")
            return 0
        trouble = ""
        while not left.is_set():
            try:
                if not autoscaler.poll():
                    break
                trouble = ""
            except (VjobError, OSError) as error:
                if str(error) != trouble:
                    trouble = str(error)
                    say(trouble)
            left.wait(morph.look_s)
    return 0

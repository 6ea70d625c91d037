"""Change the number of nodes of a run that morphs: `vjob grow` submits a job that joins the run,
`vjob shrink` releases nodes at the next checkpoint.

    conf, plan ─► reserve seats ─► batch.<group>.sh ─► scheduler ─► joins/<number>.job.json
                  (records/morphing.py)                                 its nodes follow the manager
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from varuna_core.agent.meeting.link import call_hub
from varuna_core.records import record as records
from varuna_core.records.files import (
    as_whole,
    list_names,
    lock_file,
    read_lines,
    read_text,
    write_atomic,
    write_json,
)
from varuna_core.records.machine import start_time
from varuna_core.records.morphing import (
    GATHERING,
    Join,
    JoinJob,
    ManagerState,
    add_joins,
    get_seat,
    read_joins,
    read_state,
    reserve_seats,
    write_join_job,
)
from varuna_core.records.plan import GroupPlan, Plan, read_plan
from varuna_core.records.record import append_event
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.errors import InputError, UncertainError, VjobError
from vjob.jobs.interrupts import defer_interrupts
from vjob.jobs.runs.find import RunView, cancel_joined, find_joined_over, name_host, view_run
from vjob.jobs.runs.owner import expect_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.base import Submission
from vjob.jobs.schedulers.job import After
from vjob.jobs.submit.scripts import build_limits, render_batch

SLOW_ASKED = "slow-asked"
"""Event: the run itself asked a slow node to leave."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Nodes that now take part in a run, according to its files."""

    hosts: dict[int, str]
    """Host names of present nodes, keyed by the node's seat (its number in the run)."""
    asked: int
    """Number of present nodes of the conf; all of the conf's nodes until the manager has seen
    any."""
    joining: tuple[Join, ...]
    """Joins whose nodes are present or will be."""
    leaving: frozenset[int]
    """Seats that have already been asked to leave."""

    @property
    def waiting(self) -> tuple[Join, ...]:
        """Joins of which no node is present yet."""
        return tuple(
            join for join in self.joining if not any(seat in self.hosts for seat in join.seats)
        )

    @property
    def count(self) -> int:
        return self.asked + sum(join.group.count for join in self.joining)


def grow(
    run: RunFolder, *, count: int, queue: str | None, walltime_min: int | None, why: str = ""
) -> tuple[Join, str]:
    """Submit a job of `count` nodes that joins the run; return the join and the job's id.

    `why` is given if the run itself requests the nodes; then no other job that the run requested
    may still be waiting.
    """
    if count < 1:
        raise InputError(f"--count {count}: must be at least 1")
    view, plan = _open(run)
    conf = read_submitted(run)
    like = choose_group(plan, queue)
    members = read_members(view, plan)

    def build(joins: Sequence[Join]) -> Join:
        now = read_members(view, plan)
        _check_room(plan, now, count)
        if why and any(join.by_itself for join in now.waiting):
            raise InputError("a job that this run asked for is already waiting to join")
        return _build_join(plan, joins, like, count, queue, by_itself=bool(why))

    join = reserve_seats(run.morph, build)
    cluster = conf.cluster
    if schedulers.has_queue(view.record.scheduler):  # names of files are those of hosts
        names = {*members.hosts.values(), *read_slow_hosts(run)}
        cluster = replace(cluster, exclude=(*cluster.exclude, *sorted(names)))
    cluster = replace(cluster, walltime_min=walltime_min or cluster.walltime_min)
    wide = add_joins(plan, read_joins(run.morph))
    text = render_batch(replace(conf, cluster=cluster), wide, run, join.name, like.name)
    write_atomic(run.batch_script(join.name), text)
    from vjob.jobs.schedulers.script_executor import ScriptExecutor  # submitit: only a submit pays

    try:
        with defer_interrupts():
            # Not before the first job has begun: who comes first waits in vain.
            after = After(started=(view.record.jobs[0].id,))
            limits = build_limits(replace(conf, cluster=cluster), view.record.scheduler)
            submission = Submission(run=run, group=join.name, after=after, limits=limits)
            job = ScriptExecutor(run.path).submit_script(submission, view.record.scheduler)
            write_join_job(run.morph, join, JoinJob(job=job))
    except UncertainError:
        raise  # the job may be there: its nodes know by their group where they belong
    except VjobError as error:
        write_join_job(run.morph, join, JoinJob(job=None, reason=str(error)))
        raise
    facts: dict[str, Any] = {"group": join.name, "job": job, "seats": list(join.seats)}
    if why:
        facts["why"] = why
    append_event(run.vjob_events, "grow-asked", count=count, **facts)
    with suppress(OSError):  # a shortcut only
        index.add_job(run, job)
    return join, job


def shrink(run: RunFolder, *, count: int | None, hosts: Sequence[str]) -> list[str]:
    """Ask nodes to leave at the next checkpoint; return sentences about what was done.

    With `count`, jobs that have not started are cancelled first, then the nodes that joined last
    leave, but never the first node, where the batch script runs.
    """
    view, plan = _open(run, is_shrink=True)
    with _hold_shrinking(run):
        return _shrink(view, plan, count, hosts)


def leave_out(run: RunFolder, seat: int, why: str) -> None:
    """Ask a slow node, on behalf of the run itself, to leave at the next checkpoint; raise
    InputError if too few nodes would be left."""
    view, plan = _open(run, is_shrink=True)
    with _hold_shrinking(run):
        members = read_members(view, plan)
        here = {seat: name for seat, name in members.hosts.items() if seat not in members.leaving}
        if seat in here:
            _check_enough(run, plan, here, 1)
            write_json(run.morph.leave(seat), {"node": seat, "why": why})
            call_hub(run.morph.link)
            append_event(run.vjob_events, SLOW_ASKED, node=here[seat], seat=seat, why=why)


def read_slow_hosts(run: RunFolder) -> set[str]:
    """Return the slow hosts that the run itself released; new jobs exclude them."""
    return {
        str(event.get("node"))
        for event in read_lines(run.vjob_events)
        if isinstance(event, dict) and event.get("kind") == SLOW_ASKED
    }


@contextmanager
def _hold_shrinking(run: RunFolder) -> Iterator[None]:
    """Hold the lock for asking nodes to leave: two requests at once could leave too few nodes."""
    run.morph.make()
    with lock_file(run.morph.shrink_lock):
        yield


def _shrink(view: RunView, plan: Plan, count: int | None, hosts: Sequence[str]) -> list[str]:
    run, members = view.run, read_members(view, plan)
    here = {seat: name for seat, name in members.hosts.items() if seat not in members.leaving}
    if hosts:
        by_host = {name: seat for seat, name in here.items()}
        unknown = [name for name in hosts if name not in by_host]
        if unknown:
            raise InputError(
                f"{', '.join(unknown)}: not among the nodes of {run.name}, which are "
                f"{', '.join(by_host) or 'none yet'}"
            )
        return _let_go(run, plan, here, sorted(by_host[name] for name in hosts))
    assert count is not None
    if count < 1:
        raise InputError(f"--count {count}: must be at least 1")
    waiting: list[Join] = []
    for join in reversed(members.waiting):
        if join.group.count <= count:
            waiting.append(join)
            count -= join.group.count
    seats = sorted((seat for seat in here if seat), reverse=True)[:count]
    if len(seats) < count:
        raise InputError(
            f"only {len(seats)} of the {len(here)} nodes of {run.name} may leave, because the "
            f"batch script runs on the first one; `vjob cancel {run.name}` ends the run"
        )
    said = _let_go(run, plan, here, sorted(seats)) if seats else []
    return [*(_withdraw(view, join) for join in waiting), *said]


def read_members(view: RunView, plan: Plan) -> Members:
    """Read the members of a run from the manager's state and the joins."""
    run = view.run
    state = read_state(run.morph) or ManagerState()
    hosts = {seat: name_host(run, seat) for seat in sorted(map(get_seat, state.nodes))}
    over = find_joined_over(view)
    joining = tuple(join for join in read_joins(run.morph) if join.number not in over)
    has_begun = state.phase != GATHERING or state.attempt >= 0
    asked = sum(1 for seat in hosts if seat < plan.num_nodes) if has_begun else plan.num_nodes
    return Members(
        hosts=hosts,
        asked=asked,
        joining=joining,
        leaving=read_leaving(run),
    )


def read_leaving(run: RunFolder) -> frozenset[int]:
    """Return the seats that were asked to leave."""
    stems = [name[:-5] for name in list_names(run.morph.leave(0).parent)]
    found = map(as_whole, stems)
    return frozenset(number for number in found if number is not None)


def _open(run: RunFolder, *, is_shrink: bool = False) -> tuple[RunView, Plan]:
    expect_ours(run, "only the run's owner may change its nodes")
    view = view_run(run, warn=False)
    plan = read_plan(run.plan)
    if plan is None or plan.morphing is None:
        raise InputError(
            f"the nodes of {run.name} cannot change: submit with `morph: {{enabled: true}}`"
        )
    if plan.machine_list is not None and not is_shrink:
        raise InputError(f"{run.name} runs on a list of machines: add hosts to {plan.machine_list}")
    if view.record.state != records.SUBMITTED:
        raise InputError(
            f"{run.name} is over: {view.state}; submit its conf again with other nodes to "
            "continue from its newest checkpoint"
        )
    if view.problem and not is_shrink:
        raise VjobError(
            f"no job is submitted: {view.record.scheduler} does not answer ({view.problem}); "
            "try again once it does"
        )
    return view, plan


def read_submitted(run: RunFolder) -> JobConf:
    """Read the conf as submitted, without secrets, which are not needed here."""
    return parse_conf(read_text(run.resolved), str(run.resolved), run.path)


def choose_group(plan: Plan, queue: str | None) -> GroupPlan:
    """Return the conf's node group whose settings new nodes get: the group with this queue, else
    the first group."""
    if queue is None:
        return plan.groups[0]
    return next((group for group in plan.groups if group.queue == queue), plan.groups[0])


def _check_room(plan: Plan, members: Members, count: int) -> None:
    assert plan.morphing is not None
    most = plan.morphing.max_nodes
    if members.count + count > most:
        raise InputError(
            f"{members.count} nodes and {count} more exceed morph.max_nodes, {most}, as set at "
            f"submit; at most {max(most - members.count, 0)} may join, or submit again with a "
            "higher value"
        )


def _build_join(
    plan: Plan,
    joins: Sequence[Join],
    like: GroupPlan,
    count: int,
    queue: str | None,
    *,
    by_itself: bool,
) -> Join:
    wide = add_joins(plan, joins)
    taken = {group.name for group in wide.groups}
    names = (f"join{number}" for number in range(len(joins) + 1, len(joins) + len(taken) + 2))
    group = replace(
        like,
        name=next(name for name in names if name not in taken),
        count=count,
        queue=queue or like.queue,
        first_node=wide.num_nodes,
        first_rank=wide.world,
    )
    return Join(
        number=len(joins),
        group=group,
        asked=round(time.time(), 3),
        host=platform.node(),
        pid=os.getpid(),
        pid_start=start_time(os.getpid()),
        by_itself=by_itself,
    )


def _let_go(run: RunFolder, plan: Plan, here: dict[int, str], seats: Sequence[int]) -> list[str]:
    _check_enough(run, plan, here, len(seats))
    for seat in seats:
        write_json(run.morph.leave(seat), {"node": seat})
    call_hub(run.morph.link)
    names = [here[seat] for seat in seats]
    append_event(run.vjob_events, "shrink-asked", nodes=names, seats=list(seats))
    return [f"{', '.join(names)}: asked to leave at the next checkpoint"]


def _check_enough(run: RunFolder, plan: Plan, here: dict[int, str], count: int) -> None:
    assert plan.morphing is not None
    fewest, left = plan.morphing.min_nodes, len(here) - count
    if left < fewest:
        raise InputError(
            f"{len(here)} nodes without {count} are {left}, fewer than morph.min_nodes, "
            f"{fewest}; at most {max(len(here) - fewest, 0)} may leave, or `vjob cancel {run.name}`"
        )


def _withdraw(view: RunView, join: Join) -> str:
    cancel_joined(view, [join])
    append_event(view.run.vjob_events, "shrink-asked", nodes=[], seats=list(join.seats))
    return f"{join.name}: its job of {join.group.count} nodes had not started and was cancelled"

"""`close`: judge how an attempt ended, from what its nodes left in the run folder.

srun's own exit code counts only if the ranks' exit files do not explain the end: srun may return
143 for a rank that exited with 9, and 0 for a step that never launched.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from varuna_core.agent.checks.host import FULL_BYTES
from varuna_core.agent.meeting.link import call_hub
from varuna_core.agent.meeting.watch import Peer
from varuna_core.agent.restarts import (
    Again,
    await_first_group,
    choose_code,
    continue_run,
    find_short,
)
from varuna_core.agent.setup.site import group_of
from varuna_core.facts.catalogue.ends import refine_end
from varuna_core.facts.cause import Actor, End, EndCause
from varuna_core.facts.deciding import choose_end
from varuna_core.facts.known import Evidence, Sure
from varuna_core.facts.sentences import LEFT_SHORT
from varuna_core.records.exits import (
    HUNG,
    NODE_LOST,
    NOT_READY,
    Judgement,
    RankExit,
    conclude,
    find_exited,
    judge_exits,
    read_exits,
    read_outcome,
    write_judgement,
)
from varuna_core.records.files import is_listed, read_json
from varuna_core.records.logs.rank_output import find_node_failure
from varuna_core.records.nodes import read_reports
from varuna_core.records.plan import GroupPlan, NodePlan, Plan
from varuna_core.records.record import append_event, is_cancel_asked, read_events
from varuna_core.records.requests import REQUEUE, read_signal, read_stop, write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder

LANDING_S = 3.0
"""Seconds for files that other nodes wrote before srun returned to appear on this node."""
POLL_S = 0.3
CALLERS = ("batch-", "supervisor-")
"""Beginnings of the keys of signals that came from the scheduler."""


@dataclass
class Scene:
    """An attempt whose end is to be judged."""

    run: RunFolder
    plan: Plan
    attempt: AttemptFolder
    status: int
    """srun's exit code."""


@dataclass(frozen=True)
class Closed:
    """Next action of the batch script: exit with this code, or go on."""

    code: int
    again: Optional[Again] = None
    is_requeue: bool = False
    """True if the job is to be requeued, on whatever nodes it gets."""


def close_attempt(
    run: RunFolder,
    plan: Plan,
    number: int,
    group_name: str | None,
    status: int,
    *,
    called: bool = False,
    left_s: float | None = None,
) -> Closed:
    """Wait for the exit files of an attempt, judge its end and decide on a restart.

    `called` is true if the batch script was asked to end, `left_s` the time to the job's limit.
    """
    group = group_of(plan, group_name)
    scene = Scene(run, plan, run.attempt(number), status)
    scene.attempt.make()
    if group is not None:
        code = _close_group(scene, plan.group(group))
        return Closed(code, None if called else await_first_group(run, plan, scene.attempt))
    first = plan.groups[0] if plan.layout == "split" else None
    _wait_for_exits(scene, first)
    judged = judge(scene)
    if _is_called(scene, judged) and not is_cancel_asked(run):
        judged = _judge_call(scene, judged)
    why_not, again = continue_run(run, plan, scene.attempt, judged, called=called, left_s=left_s)
    judged = judged.with_note(why_not)
    _tell(scene, None, judged)
    if again is not None:
        said = f"attempt {again.number} starts in {again.wait_s:g} s on the same nodes"
        print(said, file=sys.stderr)
    is_hang = judged.outcome.code == HUNG and plan.hang_do == "requeue"
    comes_again = is_requeue(scene.attempt) or (is_hang and not why_not)
    is_short = judged.end.cause is EndCause.TIME_LIMIT
    return Closed(choose_code(run, judged.outcome.code, is_short=is_short), again, comes_again)


def _is_called(scene: Scene, judged: Judgement) -> bool:
    """Return True if the ranks exited 0 after the scheduler's SIGUSR1 asked them to save."""
    asked = read_signal(scene.attempt)
    is_called = asked is not None and asked[0] == signal.SIGUSR1 and asked[1].startswith(CALLERS)
    return is_called and judged.end.cause is EndCause.COMPLETED


def _judge_call(scene: Scene, judged: Judgement) -> Judgement:
    """Judge ranks that exited 0 when asked to: the time limit is the cause if steps are missing."""
    short = find_short(scene.run, scene.plan, scene.attempt)
    if short is None:
        return judged.with_note(
            "SIGUSR1, as sent before the time limit, had asked the ranks to save and exit"
        )
    seen = Evidence(LEFT_SHORT, Sure.INFERRED, seen=short[0], expected=short[1])
    evidence = (seen, *judged.end.evidence)
    end = replace(judged.end, cause=EndCause.TIME_LIMIT, actor=Actor.SCHEDULER, evidence=evidence)
    return conclude(end, judged.outcome.missing_ranks)


def is_requeue(attempt: AttemptFolder) -> bool:
    """Return True if the ranks exited 0 and asked for a requeue of the job."""
    outcome, stop = read_outcome(attempt), read_stop(attempt)
    return outcome is not None and outcome.code == 0 and (stop or {}).get("kind") == REQUEUE


def judge(scene: Scene) -> Judgement:
    """Judge how the attempt ended from its ranks, its nodes and, last, srun's own exit code."""
    plan, attempt = scene.plan, scene.attempt
    exits = read_exits(attempt, plan.world)
    stop = read_stop(attempt)
    reports = read_reports(attempt)
    names = {index: report.host for index, report in reports.items()}
    judged = judge_exits(plan, exits, stop, names, round(time.time(), 3))
    judged = conclude(refine_end(judged.end), judged.outcome.missing_ranks)
    failure = find_node_failure(scene.run.batch_logs(), attempt.number)
    if failure is not None and judged.outcome.code != 0:
        judged = conclude(choose_end(judged.end, failure), judged.outcome.missing_ranks)
    code = judged.outcome.code
    if judged.outcome.missing_ranks and (full := explain_full(scene.run.path)):
        return _replace(judged, EndCause.NO_ROOM, code or NODE_LOST, full, has_other=True)
    if not exits and stop is None and not is_listed(attempt.go):
        when = "before any agent reported" if not reports else "before the ranks started"
        reason = f"{_step(plan)} ended with {scene.status} {when}: see the scheduler's log"
        cause = EndCause.START_FAILED if reports else EndCause.NOT_MET
        return _replace(judged, cause, scene.status or NOT_READY, reason)
    silent = [index for index in range(plan.num_nodes) if index not in reports]
    if not is_listed(attempt.go) and silent and (stop or {}).get("kind") == "signal":
        # srun told the others: the one that never reported is the cause.
        return _blame_silent(plan, judged, silent)
    if code == 0 and scene.status != 0 and stop is None:
        reason = f"{_step(plan)} ended with {scene.status} although all ranks exited 0"
        return _replace(judged, EndCause.UNKNOWN, scene.status, reason)
    return judged


def _step(plan: Plan) -> str:
    return "the step over ssh" if plan.scheduler == "ssh" else "srun"


def explain_full(folder: Path) -> str:
    """Explain missing files if the disk of `folder` is full or unreadable; else return ''."""
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return f"the run folder cannot be read: {error.strerror}"
    is_full = stat.f_bavail * stat.f_frsize < FULL_BYTES
    return f"the disk of the run folder {folder} is full" if is_full else ""


def _blame_silent(plan: Plan, judged: Judgement, silent: list[int]) -> Judgement:
    names = ", ".join(f"{index} ({plan.node(index).group.name})" for index in silent[:8])
    more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
    reason = (
        f"no report from node {names}{more} before the end: setup or the agent failed there, "
        "see the scheduler's log"
    )
    code = judged.outcome.code or NOT_READY
    return _replace(judged, EndCause.NOT_MET, code, reason, has_other=True)


def _replace(
    judged: Judgement, cause: EndCause, code: int, reason: str, *, has_other: bool = False
) -> Judgement:
    """Replace the cause; `reason` is its first evidence. With `has_other`, keep the previous reason
    as a note."""
    witness = Evidence("close", Sure.INFERRED, text=reason)
    end = End(cause, Actor.UNKNOWN, code=code, at=judged.end.at, started=judged.end.started)
    end = replace(end, evidence=(witness, *judged.end.evidence))
    found = conclude(end, judged.outcome.missing_ranks)
    return found.with_note(f"else: {judged.outcome.reason}") if has_other else found


def _close_group(scene: Scene, group: GroupPlan) -> int:
    """Close a job of a split run other than the first: record its end and stop the others if it
    failed. Return its exit code."""
    _wait_for_exits(scene, group)
    exits = read_exits(scene.attempt, scene.plan.world)
    own = [item for rank, item in exits.items() if _is_in(group, rank)]
    code = worst_code(own, scene.status)
    if (read_stop(scene.attempt) or {}).get("code") == 0:
        code = worst_code(own, 0)
    if code != 0:
        what = f"the job of group {group.name} ended with {code}"
        write_stop(scene.attempt, "group", code, f"{what}: see the scheduler's log of that group")
        call_hub(scene.attempt.link)
    append_event(
        scene.run.events(group.name),
        "ended",
        attempt=scene.attempt.number,
        group=group.name,
        code=code,
        srun=scene.status,
    )
    print(f"group {group.name} of attempt {scene.attempt.number}: code {code}", file=sys.stderr)
    return code


def worst_code(exits: list[RankExit], status: int) -> int:
    """Return the exit code of the first rank that failed by itself, else srun's."""
    failed = [item for item in exits if item.code != 0 and not item.stopped]
    return min(failed, key=lambda item: (item.ended, item.rank)).code if failed else status


def _tell(scene: Scene, group: str | None, judged: Judgement) -> None:
    number, outcome = scene.attempt.number, judged.outcome
    print(f"attempt {number}: code {outcome.code}: {outcome.reason}", file=sys.stderr)
    try:
        write_judgement(scene.attempt, judged)
        append_event(
            scene.run.events(group),
            "ended",
            attempt=number,
            code=outcome.code,
            reason=outcome.reason,
            srun=scene.status,
        )
    except OSError as error:  # a full disk must not hide the code
        print(f"the outcome could not be written: {error}", file=sys.stderr)


def _wait_for_exits(scene: Scene, own: GroupPlan | None) -> None:
    """Wait for the exit files that can still come.

    Once srun has returned, its own nodes write no further exit files; existing files get
    `LANDING_S` to appear here. For a split run's other groups, wait as long as their nodes give
    signs of life, but only until the grace is over if the attempt is ending.
    """
    plan, attempt = scene.plan, scene.attempt
    if not is_listed(attempt.go):
        return
    ranks = [rank for rank in range(plan.world) if _is_awaited(plan, own, rank)]
    peers = {node.index: Peer(node) for node in _list_other_nodes(plan, own)}
    begun = hopeful = time.monotonic()
    landed: set[int] = set()
    while True:
        landed |= find_exited(attempt, plan, (rank for rank in ranks if rank not in landed))
        missing = [rank for rank in ranks if rank not in landed]
        now = time.monotonic()
        if not missing:
            return
        is_ending = scene.status != 0 or is_listed(attempt.stop)
        limit = plan.timing.grace_s + plan.timing.lost_s if is_ending else float("inf")
        if now - begun < limit and _is_any_living(scene, peers, missing, now):
            hopeful = now
        if now - hopeful > LANDING_S:
            return
        time.sleep(POLL_S)


def _is_awaited(plan: Plan, own: GroupPlan | None, rank: int) -> bool:
    """Return True if this job waits for the rank: the first group's job does so for all ranks."""
    return own is None or own is plan.groups[0] or _is_in(own, rank)


def _list_other_nodes(plan: Plan, own: GroupPlan | None) -> list[NodePlan]:
    if own is not plan.groups[0]:
        return []
    return [plan.node(index) for index in range(own.count, plan.num_nodes)]


def read_ended_groups(run: RunFolder, attempt: int) -> set[str]:
    """Return the groups of a split run whose jobs have ended and write no further exit files."""
    return {
        str(event.get("group"))
        for event in read_events(run)
        if event.get("kind") == "ended" and event.get("attempt") == attempt
    }


def _is_any_living(scene: Scene, peers: dict[int, Peer], missing: list[int], now: float) -> bool:
    """Return True if another job's node that still has to write exit files is alive."""
    plan, attempt = scene.plan, scene.attempt
    owing = {plan.node_of_rank(rank).index for rank in missing} & set(peers)
    ended = read_ended_groups(scene.run, attempt.number)
    owing = {index for index in owing if plan.node(index).group.name not in ended}
    return any(
        peers[index].is_living(read_json(attempt.beat(index)), now, plan.timing.lost_s)
        for index in sorted(owing)
    )


def _is_in(group: GroupPlan, rank: int) -> bool:
    return group.first_rank <= rank < group.first_rank + group.count * group.ranks

"""The verdict on a snapshot: the first rule that speaks. Pure.

the record, the scheduler      refused, pending, requeued, morphing
what is over                   done, dead
what cannot go on              a rank failed, wrong settings, NaN, errors
what does not go on            stopped ranks, checkpoints, stalls, start-up
how it goes on                 stragglers, heat, slower steps, healthy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.jobs.monitor.model.verdict import Health, Verdict
from vjob.jobs.monitor.rules import ended as rules_end
from vjob.jobs.monitor.rules import failing as rules_fail
from vjob.jobs.monitor.rules import numbers as rules_numbers
from vjob.jobs.monitor.rules import speed as rules_pace
from vjob.jobs.monitor.rules import stalled as rules_stall
from vjob.jobs.monitor.rules import waiting as rules_queue
from vjob.jobs.monitor.rules.base import Rule
from vjob.jobs.monitor.rules.pace import FLOOR_S
from vjob.jobs.monitor.rules.remarks import list_remarks

RULES: tuple[Rule, ...] = (
    rules_queue.refused,
    rules_queue.submitting,
    rules_queue.morphing,
    rules_end.done,
    rules_end.dead,
    rules_queue.never_starts,
    rules_queue.requeued,
    rules_queue.pending,
    rules_queue.suspended,
    rules_end.abandoned,
    rules_stall.lost_node,
    rules_fail.rank_failed,
    rules_fail.told_to_end,
    rules_pace.ending,
    rules_fail.wrong_setting,
    rules_numbers.not_a_number,
    rules_numbers.loss_scale,
    rules_numbers.gradients_explode,
    rules_stall.held_up,
    rules_fail.disk_full,
    rules_fail.error_line,
    rules_stall.in_phase,
    rules_stall.stalled,
    rules_fail.no_gpu_process,
    rules_stall.starting,
    rules_pace.straggler,
    rules_pace.throttled,
    rules_pace.slower,
    rules_pace.healthy,
    rules_pace.unknown,
)
"""In order; the last one always speaks."""
ALSO = (Health.FAILING, Health.STALLED, Health.SLOW)
"""Of the rules after the first that spoke, those that say so are remarks."""
RUNS = (*ALSO, Health.HEALTHY, Health.CHECKPOINTING, Health.STARTING)
"""Only where it runs; what is over is over."""
LOOKS = 3
"""SLOW is said when so many looks in a row found it, or all where there were fewer."""


def judge(
    snapshot: Snapshot, history: Sequence[Snapshot] | None = None, *, floor_s: float = FLOOR_S
) -> Verdict:
    """How the job is.

    `history` are earlier snapshots of it, oldest first: with some, a passing slowness is a remark.
    `floor_s` is the shortest silence that may be called a stall; the job's steps make it longer.
    """
    spoken = _list_verdicts(snapshot, floor_s)
    first = spoken[0]
    others = spoken[1:]
    if first.health is Health.SLOW and history and not _lasts(first, snapshot, history, floor_s):
        others = [first, *others]
        first = next(item for item in spoken if item.health is not Health.SLOW)
    also = [item.reason for item in others if _adds(item, first)]
    remarks = tuple(dict.fromkeys([*first.remarks, *also, *list_remarks(snapshot)]))
    return replace(first, remarks=remarks)


def _list_verdicts(snapshot: Snapshot, floor_s: float) -> list[Verdict]:
    found = []
    for rule in RULES:
        if rule is rules_stall.stalled:
            verdict = rules_stall.stalled(snapshot, floor_s)
        else:
            verdict = rule(snapshot)
        if verdict is not None:
            found.append(verdict)
    return found


def _adds(other: Verdict, first: Verdict) -> bool:
    """Whether a rule that came later says more of a job that runs: one stall is enough."""
    if first.health not in RUNS or other.health not in ALSO:
        return False
    return not first.health is other.health is Health.STALLED


def _lasts(
    verdict: Verdict, snapshot: Snapshot, history: Sequence[Snapshot], floor_s: float
) -> bool:
    """Whether the last looks at the same attempt found the same."""
    before = [item for item in history if item.attempt == snapshot.attempt][-(LOOKS - 1) :]
    return all(
        any(
            (found.rule, found.rank) == (verdict.rule, verdict.rank)
            for found in _list_verdicts(item, floor_s)
        )
        for item in before
    )

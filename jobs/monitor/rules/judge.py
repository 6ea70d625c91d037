"""Evaluate all rules on a snapshot; the first rule that applies makes the verdict. Pure.

Sentences are added last, once the verdict is complete (`words.py`).

the record, the scheduler      refused, pending, requeued, morphing
what is over                   done, dead
what cannot go on              a rank failed, wrong settings, NaN, errors
what does not go on            stopped ranks, checkpoints, stalls, start-up
how it goes on                 stragglers, heat, slower steps, healthy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from varuna_core.facts.finding import Finding
from varuna_core.facts.known import Value
from vjob.jobs.monitor.model.snapshot import Health, Snapshot, Verdict
from vjob.jobs.monitor.rules import ended, failing, speed, stalled, waiting
from vjob.jobs.monitor.rules.base import Rule, context_of_job, name_job
from vjob.jobs.monitor.rules.doubts import weigh_lines
from vjob.jobs.monitor.rules.pace import FLOOR_S
from vjob.jobs.monitor.rules.remarks import list_remarks
from vjob.jobs.monitor.rules.words import put_into_words

RULES: tuple[Rule, ...] = (
    waiting.refused,
    waiting.submitting,
    waiting.no_room,
    waiting.morphing,
    ended.done,
    ended.dead,
    waiting.never_starts,
    waiting.requeued,
    waiting.pending,
    waiting.suspended,
    ended.abandoned,
    stalled.lost_node,
    failing.rank_failed,
    failing.asked_to_end,
    speed.ending,
    failing.wrong_setting,
    failing.not_a_number,
    failing.loss_scale,
    failing.gradients_explode,
    stalled.hangs,
    stalled.held_up,
    failing.saves_skipped,
    failing.disk_full,
    failing.gpu_lost,
    failing.sick_hardware,
    failing.error_line,
    stalled.in_phase,
    stalled.stalled,
    stalled.stands,
    failing.no_gpu_process,
    stalled.running,
    stalled.starting,
    speed.straggler,
    speed.throttled,
    speed.slower,
    speed.healthy,
    speed.unknown,
)
"""The rules in order of precedence; the last rule always applies."""
ALSO = (Health.FAILING, Health.STALLED, Health.SLOW)
"""Verdicts with these healths of later rules become remarks."""
RUNS = (*ALSO, Health.HEALTHY, Health.CHECKPOINTING, Health.STARTING, Health.RUNNING)
"""Healths of a running job, the only ones to which later rules may add remarks."""
LOOKS = 3
"""Number of consecutive snapshots that must be SLOW before the verdict is SLOW; if there are fewer
snapshots, all of them."""


def judge(
    snapshot: Snapshot, history: Sequence[Snapshot] | None = None, *, floor_s: float = FLOOR_S
) -> Verdict:
    """Evaluate the rules on a snapshot and return the verdict.

    `history` are earlier snapshots of the job, oldest first; with a history, slowness that does not
    last becomes a remark. `floor_s` is the shortest silence that may count as a stall; the job's
    own steps may raise this limit.
    """
    snapshot = weigh_lines(snapshot)
    spoken = _list_verdicts(snapshot, floor_s)
    first = spoken[0]
    others = spoken[1:]
    if first.health is Health.SLOW and history and not _lasts(first, snapshot, history, floor_s):
        others = [first, *others]
        first = next(item for item in spoken if item.health is not Health.SLOW)
    also = [replace(item.main, remedies=()) for item in others if _adds(item, first)]
    remarks = list_remarks(snapshot)
    unread = [
        name for one in remarks if one.rule == "gpus not read" for name in one.values["nodes"]
    ]
    if unread and first.health is Health.HEALTHY and snapshot.num_gpus != 0:
        main = replace(first.main, values={**first.main.values, "gpus_not_read": unread})
        first = replace(first, health=Health.RUNNING, main=main)
    is_dead = first.health is Health.DEAD
    whole = replace(
        first,
        others=(*also, *(one for one in remarks if not _repeats(one, first, also))),
        context=context_of_job(snapshot),
        job=name_job(ended.choose_first_failed(snapshot) if is_dead else snapshot),
    )
    return put_into_words(whole)


def _list_verdicts(snapshot: Snapshot, floor_s: float) -> list[Verdict]:
    found = []
    for rule in RULES:
        if rule is stalled.stalled:
            verdict = stalled.stalled(snapshot, floor_s)
        elif rule is stalled.stands:
            verdict = stalled.stands(snapshot, floor_s)
        else:
            verdict = rule(snapshot)
        if verdict is not None:
            found.append(verdict)
    return found


def _adds(other: Verdict, first: Verdict) -> bool:
    """Return True if a later rule adds something to the verdict on a running job; a second stall
    adds nothing."""
    if first.health not in RUNS or other.health not in ALSO:
        return False
    return not first.health is other.health is Health.STALLED


def _repeats(remark: Finding, first: Verdict, also: Sequence[Finding]) -> bool:
    """Return True if the verdict already covers a remark: on the time limit if the verdict says
    that the run will not finish in time, or on a hardware fault that a verdict names."""
    known = isinstance(first.main.values.get("limit_left_s"), Value)
    fault = remark.values.get("fault")
    named = fault is not None and any(
        one.values.get("fault") == fault for one in (first.main, *also)
    )
    return named or (known and remark.rule == "time limit near")


def _lasts(
    verdict: Verdict, snapshot: Snapshot, history: Sequence[Snapshot], floor_s: float
) -> bool:
    """Return True if the last snapshots of the same attempt gave the same verdict."""
    before = [item for item in history if item.attempt == snapshot.attempt][-(LOOKS - 1) :]
    return all(
        any(
            (found.rule, found.rank) == (verdict.rule, verdict.rank)
            for found in _list_verdicts(item, floor_s)
        )
        for item in before
    )

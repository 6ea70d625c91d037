"""Rules for a job that makes steps: slower than before, held back by one rank, or healthy."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

from varuna_core.facts.catalogue.remedies import do
from varuna_core.facts.finding import Finding
from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value
from varuna_core.facts.remedy import Action, Remedy, Target
from varuna_core.records.logs.slow_ranks import STARK, compute_peers_work, costs_much
from vjob.jobs.monitor.model.snapshot import (
    COUNTED,
    Health,
    Rank,
    Snapshot,
    Verdict,
)
from vjob.jobs.monitor.rules.base import (
    conclude,
    find_node,
    find_step_line,
    hang_values,
    is_live,
    list_alive,
    rows_in,
    show,
    step_values,
)
from vjob.jobs.monitor.rules.pace import (
    compute_quantile,
    find_left_s,
    find_limit_left_s,
    find_pace_s,
    find_silence_s,
    is_early_silence,
    is_step_older,
    job_limit_s,
)

EXCLUDE_THIS = Remedy(Action.EXCLUDE, Target.NODE, "it")
SAME = "sequence and batch sizes are as before"
"""Condition of a remedy, since longer sequences, such as in a curriculum, also slow the steps."""
RECENT = 10
LASTS_S = 60.0
"""The recent points, which are compared with earlier ones, are at least RECENT in number and
together cover this many seconds."""
BASELINE = 20
"""Minimum number of earlier points with which the recent ones are compared."""
SLOWER = 1.5
"""Factor over the earlier median at which steps are slower."""
LEAST_S = 0.2
"""Least difference in seconds per step that counts."""
HEAT = ("hw_thermal", "sw_thermal", "hw_power_brake", "hw_slowdown")
THROTTLED = 1.2
"""Factor over the earlier median at which steps are slower, if a GPU reports throttling."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Comparison of recent step times with earlier ones."""

    before_s: float
    recent_s: float
    least_s: float
    """Lower quartile of the recent step times."""
    usual_most_s: float
    """90th percentile of the earlier step times."""


def straggler(snapshot: Snapshot) -> Verdict | None:
    """Return SLOW if a rank computes longer than ranks of the same stage and device."""
    found = find_stragglers(snapshot)
    if not found or not _steps_on(snapshot):
        return None
    rank, peers_s, score = found[0]
    return conclude(
        Health.SLOW,
        "straggler",
        {
            "rank": rank.rank,
            "node": rank.node,
            "work_s": rank.work_s if rank.work_s is not None else NotKnown("work was not traced"),
            "peers_work_s": peers_s,
            "score": score,
            "stages": list(rank.stages),
            "more_ranks": [item.rank for item, _, _ in found[1:]],
        },
        evidence=(Evidence("trace", Sure.MEASURED, seen=len(list_alive(snapshot))),),
        details=_list_gpus(snapshot, rank.node),
        remedies=(
            do("look at that node (heat, other jobs, its disk)"),
            *show(snapshot, Target.REPORT),
            replace(EXCLUDE_THIS, when="it stays so"),
        ),
        node=rank.node,
        rank=rank.rank,
    )


def find_stragglers(snapshot: Snapshot) -> list[tuple[Rank, float, float]]:
    """Return slow ranks, each with its peers' median work and its score, the slowest first.

    A rank is slow if it was slow in nearly all of the last steps; while too few steps are known, if
    it is far slower than its peers.
    """
    alive = list_alive(snapshot)
    groups: dict[tuple[tuple[int, ...] | int | None, str], list[Rank]] = {}
    found = []
    for rank in alive:
        if rank.slow is not None:
            found.append((rank, rank.slow.peers_s, 1 / rank.slow.ratio))
        if rank.work_s is not None and rank.work_s > 0:
            groups.setdefault((rank.stages or rank.stage, rank.device), []).append(rank)
    for members in groups.values():
        works = [rank.work_s or 0.0 for rank in members]
        if len(works) < 2:
            continue
        usual = compute_peers_work(works)
        for rank in members:
            own = rank.work_s or 0.0
            is_far = own > STARK.times * usual and costs_much(own - usual, rank.step_s or own)
            if is_far and rank.slow is None:
                found.append((rank, usual, usual / own))
    return sorted(found, key=lambda item: item[2])


def throttled(snapshot: Snapshot) -> Verdict | None:
    """Return SLOW if heat or power throttles a GPU and steps are slower than before."""
    hot = [
        (node, gpu.index, gpu.throttle)
        for node in snapshot.nodes
        for gpu in node.gpus
        if any(word in gpu.throttle for word in HEAT)
    ]
    change = find_slowdown(snapshot)
    if not hot or change is None or not _is_slower(change, THROTTLED):
        return None
    node, index, why = hot[0]
    names = list(dict.fromkeys(item.name for item, _, _ in hot))
    return conclude(
        Health.SLOW,
        "throttled",
        {"gpu": index, "node": node.name, "throttle": why, **_slowdown_values(change)},
        evidence=_see_pace(snapshot),
        details=(
            Finding("hot gpus", values={"num_gpus": len(hot), "nodes": names}),
            *_list_gpus(snapshot, node.name),
        ),
        remedies=(
            Remedy(Action.TELL_ADMIN, detail="about the cooling or power of that node"),
            EXCLUDE_THIS,
        ),
        node=node.name,
    )


def slower(snapshot: Snapshot) -> Verdict | None:
    """Return SLOW if the last steps take much longer than the job's earlier steps."""
    change = find_slowdown(snapshot)
    if change is None or not _is_slower(change, SLOWER):
        return None
    return conclude(
        Health.SLOW,
        "slower",
        _slowdown_values(change),
        lines=(find_step_line(snapshot),),
        evidence=_see_pace(snapshot),
        details=(Finding("step", values=step_values(snapshot)),),
        remedies=(
            do("look for a node that others use too, a slow file server, or heat", when=SAME),
            *show(snapshot, Target.REPORT, Target.STACKS),
        ),
    )


def _slowdown_values(change: Slowdown) -> dict[str, float]:
    return {"step_s": change.recent_s, "before_s": change.before_s}


def _see_pace(snapshot: Snapshot) -> tuple[Evidence, ...]:
    """Return the evidence for the pace: how many of the attempt's steps were timed."""
    progress = snapshot.progress
    if progress is None:
        return ()
    seen = len(progress.recent_times)
    first = progress.first_step
    expected = progress.step - first + 1 if first is not None else None
    name = "optimizer hook" if progress.source == COUNTED else "step lines"
    return (Evidence(name, Sure.MEASURED, progress.source, seen=seen, expected=expected),)


def find_slowdown(snapshot: Snapshot) -> Slowdown | None:
    """Compare recent with earlier steps; None if points are too few or no steps are made."""
    progress = snapshot.progress
    times = progress.step_times if progress is not None else []
    if progress is None or len(times) < RECENT or not _steps_on(snapshot):
        return None
    every = _compute_interval(snapshot)
    count, lasts = 0, 0.0
    while count < len(times) and (count < RECENT or lasts < LASTS_S):
        count += 1
        lasts += times[-count] * every
    recent = times[-count:]
    known = [one for one in (times[:-count], progress.early_times) if len(one) >= BASELINE]
    before = min(known, key=statistics.median, default=())
    if not before:
        return None
    return Slowdown(
        before_s=statistics.median(before),
        recent_s=statistics.median(recent),
        least_s=compute_quantile(recent, 0.25),
        usual_most_s=compute_quantile(before, 0.9),
    )


def _compute_interval(snapshot: Snapshot) -> float:
    """Return the median number of steps between two points."""
    points = snapshot.progress.points if snapshot.progress is not None else ()
    gaps = [b.step - a.step for a, b in pairwise(points) if b.step > a.step]
    return statistics.median(gaps) if gaps else 1.0


def healthy(snapshot: Snapshot) -> Verdict | None:
    silence = find_silence_s(snapshot)
    if silence is None or not is_live(snapshot):
        return None
    pace_s, left_s = find_pace_s(snapshot), find_left_s(snapshot)
    values = step_values(snapshot)
    is_early, is_older = is_early_silence(snapshot), is_step_older(snapshot)
    if snapshot.suspected is not None:
        values["suspect"] = Finding("hangs", values=hang_values(snapshot, snapshot.suspected))
    stands = is_early or is_older or "suspect" in values
    proof = _see_pace(snapshot)
    pace: Known[float] = NotKnown("no two steps have a time yet")
    left: Known[float] = NotKnown("the pace or the number of steps is not known")
    if pace_s is not None:
        pace = Value(pace_s, proof)
    if left_s is not None:
        estimate = tuple(replace(one, sure=Sure.ESTIMATED) for one in proof)
        left = Value(left_s, estimate)
    limit: Known[float] = NotKnown("the time limit, if any, may suffice for the run")
    limit_left_s = find_limit_left_s(snapshot)
    if limit_left_s is not None and left_s is not None and left_s > limit_left_s:
        limit = Value(limit_left_s, (Evidence(snapshot.scheduler.name),))
    return conclude(
        Health.RUNNING if stands else Health.HEALTHY,
        "healthy",
        {
            **values,
            "age_s": silence,
            "step_s": pace,
            "left_s": left,
            "limit_left_s": limit,
            "comes_back": snapshot.comes_back,
            "checkpoint_step": snapshot.checkpoint_step or NotKnown("no checkpoint is known"),
            "is_early": is_early,
            "is_older": is_older,
            "limit_s": job_limit_s(snapshot),
        },
        lines=(find_step_line(snapshot),),
        remedies=show(snapshot, Target.STACKS) if stands else (),
    )


def ending(snapshot: Snapshot) -> Verdict | None:
    """Return a verdict if all ranks exited 0 or the job is completing, and no end is recorded."""
    exits = [rank.exit for rank in snapshot.ranks]
    if is_live(snapshot) and exits and all(item is not None and item.code == 0 for item in exits):
        proof = Evidence("exit file", Sure.MEASURED, seen=len(exits), expected=snapshot.world)
        return conclude(Health.HEALTHY, "ending", {"num_exited": len(exits)}, evidence=(proof,))
    if not rows_in(snapshot, ("COMPLETING",)) or rows_in(snapshot, ("RUNNING",)):
        return None
    return conclude(
        Health.HEALTHY if _steps_on(snapshot) else Health.UNKNOWN,
        "ending",
        step_values(snapshot),
        remedies=(do("ask again in a minute"),),
    )


def unknown(snapshot: Snapshot) -> Verdict | None:
    """Return UNKNOWN; this is the last rule, if no other applies."""
    words = sorted({row.word or row.state for row in snapshot.scheduler.jobs})
    values = {
        "scheduler": snapshot.scheduler.name,
        "no_answer": bool(snapshot.scheduler.problem),  # a remark has what it printed
        "words": words,
        **step_values(snapshot),
    }
    if snapshot.outcome is not None:
        values["ended"] = snapshot.outcome.reason
    remedies = show(snapshot, Target.LOGS) or (do("ask again later"),)
    return conclude(Health.UNKNOWN, "unknown", values, remedies=remedies)


def _is_slower(change: Slowdown, times: float) -> bool:
    return (
        change.least_s > times * change.before_s
        and change.recent_s > change.usual_most_s
        and change.recent_s - change.before_s > LEAST_S
    )


def _steps_on(snapshot: Snapshot) -> bool:
    silence = find_silence_s(snapshot)
    return silence is not None and is_live(snapshot) and silence <= job_limit_s(snapshot)


def _list_gpus(snapshot: Snapshot, name: str) -> tuple[Finding, ...]:
    node = find_node(snapshot, name)
    if node is None:
        return ()
    temperatures = [gpu.temperature for gpu in node.gpus if gpu.temperature is not None]
    throttle = sorted({gpu.held_down for gpu in node.gpus if gpu.held_down})
    found = []
    if temperatures:
        proof = Evidence("GPU samples", Sure.MEASURED, seen=len(temperatures))
        values = {"node": name, "degrees": max(temperatures)}
        found.append(Finding("temperature", values=values, evidence=(proof,)))
    if throttle:
        found.append(Finding("throttle", values={"node": name, "reasons": throttle}))
    return tuple(found)

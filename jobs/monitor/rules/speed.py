"""Rules for a job that does its steps: slower than it was, held back by one rank, or well."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.slow_ranks import STARK, costs_much, find_peers_work
from vjob.jobs.monitor.model.snapshot import Health, Line, Node, Rank, Snapshot, Verdict
from vjob.jobs.monitor.rules.base import (
    advise,
    find_step_line,
    format_names,
    format_rank,
    format_step,
    is_live,
    list_alive,
    rows_in,
)
from vjob.jobs.monitor.rules.pace import (
    find_left_s,
    find_pace_s,
    find_quantile,
    find_silence_s,
    is_long_for_pace,
    job_limit_s,
    knows_few_gaps,
    list_step_times,
)

RECENT = 10
LASTS_S = 60.0
"""Points that are compared with those before: so many at least, and of so long a time."""
BASELINE = 20
"""So many points before them, at least."""
SLOWER = 1.5
"""Times the median before, for the lower quarter of the recent ones too."""
LEAST_S = 0.2
"""A step that is slower by less is nobody's worry."""
HEAT = ("hw_thermal", "sw_thermal", "hw_power_brake", "hw_slowdown")
THROTTLED = 1.2
"""Times the median before, where a GPU says that it is held down."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Recent steps against those before."""

    before_s: float
    recent_s: float
    least_s: float
    """Lower quarter of the recent ones."""
    usual_most_s: float
    """Upper tenth of those before."""


def straggler(snapshot: Snapshot) -> Verdict | None:
    """A rank that works longer than ranks of the same stage and device."""
    found = find_stragglers(snapshot)
    if not found or not _steps_on(snapshot):
        return None
    rank, peers_s, score = found[0]
    more = ""
    if len(found) > 1:
        more = f"; so do ranks {format_names(str(item.rank) for item, _, _ in found[1:])}"
    held = " and ".join(map(str, rank.stages))
    stage = f" of stage{'s' * (len(rank.stages) > 1)} {held}" if held else ""
    return Verdict(
        health=Health.SLOW,
        rule="straggler",
        reason=f"{format_rank(rank.rank, rank.node)} works {rank.work_s or 0:.3g} s a step, "
        f"its peers{stage} {peers_s:.3g} s (score {score:.2f}){more}",
        facts=_gpu_facts(snapshot, rank.node),
        advice=f"look at that node (heat, other jobs, its disk); {advise(snapshot, 'report JOB')}; "
        f"leave it out with cluster.exclude if it stays so",
        node=rank.node,
        rank=rank.rank,
    )


def find_stragglers(snapshot: Snapshot) -> list[tuple[Rank, float, float]]:
    """Rank, its peers' median work and its score; the worst first.

    Those slow in nearly all of the last steps, and before so many are known those far behind.
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
        usual = find_peers_work(works)
        for rank in members:
            own = rank.work_s or 0.0
            is_far = own > STARK.times * usual and costs_much(own - usual, rank.step_s or own)
            if is_far and rank.slow is None:
                found.append((rank, usual, usual / own))
    return sorted(found, key=lambda item: item[2])


def throttled(snapshot: Snapshot) -> Verdict | None:
    """A GPU's clock is held down by heat or power, and steps are slower."""
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
    names = format_names(dict.fromkeys(item.name for item, _, _ in hot))
    return Verdict(
        health=Health.SLOW,
        rule="throttled",
        reason=f"GPU {index} of {node.name} is held down ({why}) and steps take "
        f"{change.recent_s:.3g} s, before {change.before_s:.3g} s",
        facts=(f"{len(hot)} GPU(s) of {names}", *_gpu_facts(snapshot, node.name)),
        advice="tell an admin: cooling or power of that node; leave it out with cluster.exclude",
        node=node.name,
    )


def slower(snapshot: Snapshot) -> Verdict | None:
    """The last steps take much longer than the job's own before."""
    change = find_slowdown(snapshot)
    if change is None or not _is_slower(change, SLOWER):
        return None
    times = change.recent_s / change.before_s
    return Verdict(
        health=Health.SLOW,
        rule="slower",
        reason=f"a step takes {change.recent_s:.3g} s now and took {change.before_s:.3g} s before "
        f"({times:.1f} times)",
        evidence=_last_line(snapshot),
        facts=(format_step(snapshot),),
        advice=f"look for a node that others use too, a slow file server, or heat; "
        f"{advise(snapshot, 'report JOB', 'stacks JOB')}",
    )


def find_slowdown(snapshot: Snapshot) -> Slowdown | None:
    """None where there are too few points, or the job does no steps."""
    times = list_step_times(snapshot)
    if len(times) < RECENT + BASELINE or not _steps_on(snapshot):
        return None
    every = _find_interval(snapshot)
    count, lasts = 0, 0.0
    while count < len(times) and (count < RECENT or lasts < LASTS_S):
        count += 1
        lasts += times[-count] * every
    before, recent = times[:-count], times[-count:]
    if len(before) < BASELINE:
        return None
    return Slowdown(
        before_s=statistics.median(before),
        recent_s=statistics.median(recent),
        least_s=find_quantile(recent, 0.25),
        usual_most_s=find_quantile(before, 0.9),
    )


def _find_interval(snapshot: Snapshot) -> float:
    """Steps between two points."""
    points = snapshot.progress.points if snapshot.progress is not None else ()
    gaps = [b.step - a.step for a, b in pairwise(points) if b.step > a.step]
    return statistics.median(gaps) if gaps else 1.0


def healthy(snapshot: Snapshot) -> Verdict | None:
    silence = find_silence_s(snapshot)
    if silence is None or not is_live(snapshot):
        return None
    pace_s, left_s = find_pace_s(snapshot), find_left_s(snapshot)
    pace = "" if pace_s is None else f", {pace_s:.3g} s a step"
    left = "" if left_s is None else f", {format_duration(left_s)} left"
    is_early = knows_few_gaps(snapshot) and is_long_for_pace(snapshot, silence)
    if is_early:
        limit = format_duration(job_limit_s(snapshot))
        left = f"; after so few steps it is too early to judge: STALLED after {limit} without one"
    return Verdict(
        health=Health.HEALTHY,
        rule="healthy",
        reason=f"{format_step(snapshot)} {format_duration(silence)} ago{pace}{left}",
        evidence=_last_line(snapshot),
        advice=advise(snapshot, "stacks JOB") if is_early else "",
    )


def ending(snapshot: Snapshot) -> Verdict | None:
    """All ranks exited 0, or the scheduler ends the job, and nobody has said how it went yet."""
    exits = [rank.exit for rank in snapshot.ranks]
    if is_live(snapshot) and exits and all(item is not None and item.code == 0 for item in exits):
        who = "the one rank" if len(exits) == 1 else f"all {len(exits)} ranks"
        return Verdict(
            health=Health.HEALTHY,
            rule="ending",
            reason=f"{who} exited 0, the batch script goes on",
        )
    if not rows_in(snapshot, ("COMPLETING",)) or rows_in(snapshot, ("RUNNING",)):
        return None
    return Verdict(
        health=Health.HEALTHY if _steps_on(snapshot) else Health.UNKNOWN,
        rule="ending",
        reason=f"the scheduler tidies up after it, at {format_step(snapshot)}",
        advice="ask again in a minute",
    )


def unknown(snapshot: Snapshot) -> Verdict | None:
    """The last rule: nothing tells."""
    said = snapshot.scheduler.problem
    words = sorted({row.word or row.state for row in snapshot.scheduler.jobs})
    what = f"the scheduler calls it {format_names(words)}" if words else "no scheduler knows it"
    # A remark has what it printed.
    why = f"{snapshot.scheduler.name or 'the scheduler'} does not answer" if said else what
    known = [f"{format_step(snapshot)} is known"] if snapshot.progress is not None else []
    if snapshot.outcome is not None:
        known.append(f"its last attempt ended: {snapshot.outcome.reason}")
    return Verdict(
        health=Health.UNKNOWN,
        rule="unknown",
        reason="; ".join([f"nothing tells how it is: {why}", *known]),
        advice=advise(snapshot, "logs JOB") or "ask again later",
    )


def _last_line(snapshot: Snapshot) -> tuple[Line, ...]:
    line = find_step_line(snapshot)
    return (line,) if line is not None else ()


def _is_slower(change: Slowdown, times: float) -> bool:
    return (
        change.least_s > times * change.before_s
        and change.recent_s > change.usual_most_s
        and change.recent_s - change.before_s > LEAST_S
    )


def _steps_on(snapshot: Snapshot) -> bool:
    silence = find_silence_s(snapshot)
    return silence is not None and is_live(snapshot) and silence <= job_limit_s(snapshot)


def _gpu_facts(snapshot: Snapshot, name: str) -> tuple[str, ...]:
    node: Node | None = next((item for item in snapshot.nodes if item.name == name), None)
    if node is None:
        return ()
    temperatures = [gpu.temperature for gpu in node.gpus if gpu.temperature is not None]
    facts = [f"{name}: {max(temperatures):.0f} degrees"] if temperatures else []
    throttle = {gpu.held_down for gpu in node.gpus if gpu.held_down}
    facts += [f"{name}: {format_names(sorted(throttle))}"] if throttle else []
    return tuple(facts)

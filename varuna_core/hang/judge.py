"""Decide if ranks hang, which rank blocks the others, and when this is certain. No side effects.

observed state of the ranks     acted on after          a healthy rank in the same state
stopped, dead                   HALTED_S                a rank in a debugger: never acted on
waiting, in different calls     MISMATCHED_S            none; a rank that is behind may still come
waiting for a node that is lost LOST_S, or 2 x the      none for long: a file server's outage
                                longest step
doing nothing at all, or in a   SILENT_S, or 2 x the    a sleep, or a wait for another system
loop that cannot end by itself  longest such time       that is longer than any before
one has not joined, others have JOINS_S                 a wait for another system
and prints lines                START_S                 a wait for another system
one computes, the others wait   SPINNING_S, or 10 x     an evaluation or a save by one rank
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

from varuna_core.facts.hang import Hang, HangWitness
from varuna_core.hang.flight import Flight, Gap, find_gap, find_last
from varuna_core.hang.signs import NodeSigns, RankSigns

HALTED_S = 25.0
DEAD_S = 10.0
"""Seconds for which an ended process may wait to be reaped before it counts as dead."""
STILL_S = 20.0
"""Least seconds without any change for ranks that wait in different collectives."""
MISMATCHED_S = 35.0
"""Least seconds without a step for ranks that wait in different collectives."""
LOST_S = 90.0
SILENT_S = 105.0
JOINS_S = 135.0
START_S = 600.0
"""Least seconds of silence before the first steps, or while ranks print lines, after which a hang
is assumed. Before the first steps, ranks that have not joined each other may be silent for any
time."""
SPINNING_S = 1800.0
NOTHING_LOST: Mapping[int, str] = {}
TIMES, SPINNING_TIMES = 2.0, 10.0
FLOOR_S = 90.0
"""Least value of `on_hang.after` in seconds; hangs that are certain do not wait for it."""


@dataclass(frozen=True)
class Finding:
    """A hang that is certain enough to act on (`is_due`), or that will be at `due_at`."""

    hang: Hang
    is_due: bool
    due_at: float


def find_halted(
    ranks: Sequence[RankSigns], node: str, now: float, num_nodes: int = 1
) -> Finding | None:
    """Return the hang of a rank of this node that its agent sees as stopped or dead, or None."""
    halted = [
        one
        for one in ranks
        if one.halted_s >= (DEAD_S if one.state in "ZX" else 0.1) and not one.is_watched
    ]
    if not halted or any(one.is_watched for one in ranks):
        return None
    first = max(halted, key=lambda one: (one.halted_s, -one.rank))
    witness = HangWitness.DEAD if first.state in "ZX" else HangWitness.STOPPED
    hang = Hang(
        witness=witness,
        since=now - first.silence_s if first.has_stepped else now - first.halted_s,
        seen_at=now,
        rank=first.rank,
        node=node,
        nodes=num_nodes,
        place=first.place,
        below=first.below,
    )
    return Finding(hang, first.halted_s >= HALTED_S, now + HALTED_S - first.halted_s)


def judge_hang(
    world: int,
    num_nodes: int,
    nodes: Mapping[int, NodeSigns],
    now: float,
    after_s: float | None,
    lost: Mapping[int, str] = NOTHING_LOST,
) -> Finding | None:
    """Return the hang of all ranks, judged from the observations of the nodes' agents, at time
    `now` (epoch).

    `lost` has the hosts, by node, that send no heartbeat or have no connection. Return None as long
    as another node has written no signs, or a debugger holds a rank.
    """
    ranks = {one.rank: one for signs in nodes.values() for one in signs.ranks}
    if not ranks or set(range(num_nodes)) - set(nodes) - set(lost):
        return None
    if not lost and set(ranks) != set(range(world)):
        return None
    seen = list(ranks.values())
    if any(one.is_watched or one.silence_s <= 0 for one in seen):
        return None
    where = {one.rank: signs.node for signs in nodes.values() for one in signs.ranks}
    longest_s = max(signs.longest_s for signs in nodes.values())
    quiet_s = max(signs.quiet_s for signs in nodes.values())
    silence_s, still_s = min(one.silence_s for one in seen), min(one.still_s for one in seen)
    gap = find_gap({one.rank: one.calls for one in seen if one.calls}, world)
    busy = [one for one in seen if not one.waits]
    if len(busy) > 1 or (busy and world == 1):
        return None  # they compute
    spinning = [one for one in seen if one.spins]
    odd = _find_odd(gap, busy or spinning if len(spinning) < len(seen) else (), ranks)
    is_mute = odd is None and gap is None and (odd := _find_mute(seen)) is not None
    if odd is None and gap is None:
        odd = _find_outside(seen)
    joined: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    witness = HangWitness.SILENT
    limit_s = max(SILENT_S, TIMES * quiet_s) if after_s is None else max(after_s, FLOOR_S)
    if not all(one.has_stepped for one in seen):
        if not any(one.in_collective or one.has_joined for one in seen):
            return None
        joined = tuple(sorted(one.rank for one in seen if one.has_joined))
        missing = tuple(sorted(set(ranks) - set(joined))) if joined else ()
        if after_s is None:
            limit_s = max(limit_s, JOINS_S if missing else START_S)
        odd = ranks[missing[0]] if missing and not busy else odd
    if busy:
        witness = HangWitness.SPINNING
        still_s = min(one.still_s for one in seen if one is not busy[0])
        if after_s is None:
            limit_s = max(SPINNING_S, SPINNING_TIMES * longest_s)
        is_due = silence_s >= limit_s
    elif gap is not None and gap.other:
        witness = HangWitness.MISMATCHED
        limit_s = MISMATCHED_S
        is_due = still_s >= STILL_S and silence_s >= MISMATCHED_S
    else:
        if any(one.prints for one in seen):
            limit_s = max(limit_s, START_S)
        if lost:
            witness, odd, gap, is_mute = HangWitness.LOST, None, None, False
            limit_s = max(LOST_S, TIMES * longest_s)
        elif spinning and odd is spinning[0]:
            witness = HangWitness.SPINNING
        is_due = silence_s >= limit_s and still_s >= limit_s - STILL_S
    if still_s < STILL_S:
        return None
    hang = Hang(
        witness=witness,
        since=now - silence_s,
        seen_at=now,
        rank=None if odd is None else odd.rank,
        node=next(iter(lost.values())) if witness is HangWitness.LOST else _name(odd, where),
        nodes=num_nodes,
        place="" if witness is HangWitness.LOST else _find_place(odd, seen),
        is_mute=is_mute,
        **_name_calls(gap, [one.calls for one in seen]),
    )
    if missing and odd is not None:
        hang = replace(hang, called_by=joined, missing=missing)
    return Finding(hang, is_due, now + max(limit_s - silence_s, 0.0))


def _name(odd: RankSigns | None, where: Mapping[int, str]) -> str:
    return "" if odd is None else where[odd.rank]


def _find_odd(
    gap: Gap | None, busy: Sequence[RankSigns], ranks: Mapping[int, RankSigns]
) -> RankSigns | None:
    if busy:
        return busy[0]
    if gap is None or len(gap.missing) >= len(ranks):
        return None
    return ranks[gap.missing[0]]


def _find_mute(seen: Sequence[RankSigns]) -> RankSigns | None:
    """Return the only rank whose interpreter is blocked while all others wait in collectives."""
    mute = [one for one in seen if one.is_mute]
    others = [one for one in seen if not one.is_mute]
    return mute[0] if len(mute) == 1 and others and all(x.in_collective for x in others) else None


def _find_outside(seen: Sequence[RankSigns]) -> RankSigns | None:
    """Return the only rank known to be outside of collectives while all others wait in them."""
    outside = [one for one in seen if not one.in_collective]
    return outside[0] if len(outside) == 1 < len(seen) and outside[0].place else None


def _find_place(odd: RankSigns | None, seen: Sequence[RankSigns]) -> str:
    if odd is not None:
        return odd.place
    places = {one.place for one in seen}
    return places.pop() if len(places) == 1 else ""


def _name_calls(gap: Gap | None, calls: Sequence[Flight]) -> dict[str, Any]:
    if gap is None:
        return {"last_call": find_last(dict(enumerate(calls)))}
    return {
        "collective": f"{gap.name} {gap.number}",
        "group": gap.group,
        "called_by": gap.called_by,
        "missing": gap.missing,
        "other": gap.other,
    }

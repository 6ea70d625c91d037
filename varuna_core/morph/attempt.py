"""Files of an attempt: its plan, its training, its folder; and the node at fault at its end."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import replace
from typing import Dict, Optional, Sequence, Tuple

from varuna_core.morph.layout import build_attempt
from varuna_core.morph.messages import Start
from varuna_core.morph.orders import read_presences
from varuna_core.records.exits import RankExit
from varuna_core.records.files import is_listed, write_atomic
from varuna_core.records.memory_copies import Held, WholeCopy, find_whole, pick_holders
from varuna_core.records.morphing import get_seat
from varuna_core.records.plan import Plan, write_plan
from varuna_core.records.record import append_event
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import TrainingFacts, read_training, render_training

FALLOUT = re.compile(
    r"\b(RankFailed|ChannelClosed|Dist(Network|Store|Backend)?Error|BrokenPipeError"
    r"|ConnectionError|Connection(Reset|Refused|Aborted)Error)\b"
    r"|[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe"
)
"""In the last line of a rank that lost another one: the engine's own words, torch's and gloo's."""


def find_culprit(plan: Plan, exits: Dict[int, RankExit], missing: Sequence[int]) -> Optional[int]:
    """The node's index in the plan of the attempt; `missing` are ranks that left no exit."""
    failed = [item for item in exits.values() if item.code != 0 and not item.stopped]
    own = [item.rank for item in failed if item.signal or not FALLOUT.search(item.last_words)]
    nodes = {plan.node_of_rank(rank).index for rank in own or missing}
    return nodes.pop() if len(nodes) == 1 else None


def pick_nodes(
    plan: Plan, facts: TrainingFacts, nodes: Sequence[str], held: Held
) -> Tuple[str, ...]:
    """Those of these nodes that an attempt would use, in the order of its plan.

    Where not all are used, and those that are lack a part of the copy that all `held` have in
    memory, others of the same groups take their places.
    """
    used = _pick_first(plan, facts, nodes)
    first = pick_holders({node: held.get(node, ()) for node in nodes})
    if set(first) <= set(used) or len(first) > len(used):
        return used
    rest = [node for node in used if node not in first]
    others = _pick_first(plan, facts, [*first, *rest][: len(used)])
    return others if _count_groups(plan, others) == _count_groups(plan, used) else used


def _pick_first(plan: Plan, facts: TrainingFacts, nodes: Sequence[str]) -> Tuple[str, ...]:
    assert plan.morphing is not None
    ordered = sorted(nodes, key=get_seat)[: plan.morphing.max_nodes]
    by_seat = {get_seat(node): node for node in ordered}
    found = build_attempt(plan, facts, sorted(by_seat))
    return () if found is None else tuple(by_seat[seat] for seat in found.seats)


def _count_groups(plan: Plan, nodes: Sequence[str]) -> Counter[str]:
    return Counter(plan.node(get_seat(node)).group.name for node in nodes)


def read_held(run: RunFolder, session: str) -> Held:
    """Copies that each node has in memory, as its presence tells."""
    return {item.name: item.held for item in read_presences(run.morph, session).values()}


def make_attempt(
    run: RunFolder,
    plan: Plan,
    facts: TrainingFacts,
    start: Start,
    session: str,
    *,
    whole: int,
    saved: int,
) -> None:
    """Its folder with its plan, which lands last; nothing where it is there already.

    `whole` is the iteration of the newest checkpoint that is there, or -1; `saved` that of the
    furthest that ever was.
    """
    attempt = run.attempt(start.attempt)
    attempt.make()
    if is_listed(attempt.plan):
        return
    found = build_attempt(plan, facts, [get_seat(node) for node in start.nodes])
    assert found is not None, "the nodes were chosen because a plan fits them"
    if facts.is_own:
        env = found.plan.env if saved < 0 else {**found.plan.env, "VJOB_SAVED": str(saved)}
        write_plan(attempt.plan, replace(found.plan, env=env))
        return
    copy = _find_copy(run, start, session, whole)
    own = replace(
        read_training(run.training),
        pipeline=found.plan.pipeline,
        partition=found.plan.partition,
        from_memory=None if copy is None else copy.name,
        saved=saved,
    )
    write_atomic(attempt.training, render_training(own))
    command = tuple(
        str(attempt.training) if word == str(run.training) else word for word in found.plan.command
    )
    write_plan(attempt.plan, replace(found.plan, command=command))


def _find_copy(run: RunFolder, start: Start, session: str, whole: int) -> Optional[WholeCopy]:
    """Find the copy that its nodes hold in memory together, if newer than the checkpoint."""
    held = read_held(run, session)
    found = find_whole({node: held.get(node, ()) for node in start.nodes})
    if found is None or found.iteration <= whole:
        return None
    facts = {"iteration": found.iteration, "nodes": [get_seat(node) for node in found.holders]}
    with contextlib.suppress(OSError):
        append_event(run.morph_events, "from-memory", attempt=start.attempt, **facts)
    return found

"""Write the files of an attempt, and find the node at fault at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Optional, Sequence, Tuple

from varuna_core.morph.layout import build_attempt
from varuna_core.morph.messages import Start
from varuna_core.records.exits import RankExit, is_fallout
from varuna_core.records.files import is_listed, write_atomic
from varuna_core.records.morphing import get_seat
from varuna_core.records.plan import Plan, write_plan
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import TrainingFacts, read_training, render_training


def find_culprit(plan: Plan, exits: Dict[int, RankExit], missing: Sequence[int]) -> Optional[int]:
    """Return the index in the plan of the node at fault; `missing` are ranks without an exit."""
    failed = [item for item in exits.values() if item.code != 0 and not item.stopped]
    own = [item.rank for item in failed if not is_fallout(item)]
    nodes = {plan.node_of_rank(rank).index for rank in own or missing}
    return nodes.pop() if len(nodes) == 1 else None


def pick_nodes(plan: Plan, facts: TrainingFacts, nodes: Sequence[str]) -> Tuple[str, ...]:
    """Return those of the available `nodes` that an attempt would use, in the order of its plan."""
    assert plan.morphing is not None
    ordered = sorted(nodes, key=get_seat)[: plan.morphing.max_nodes]
    by_seat = {get_seat(node): node for node in ordered}
    found = build_attempt(plan, facts, sorted(by_seat))
    return () if found is None else tuple(by_seat[seat] for seat in found.seats)


def make_attempt(
    run: RunFolder,
    plan: Plan,
    facts: TrainingFacts,
    start: Start,
    *,
    saved: int,
) -> None:
    """Write the attempt's folder, and its plan last; do nothing if the plan exists already.

    `saved` is the furthest iteration ever saved, or -1.
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
    own = replace(
        read_training(run.training),
        pipeline=found.plan.pipeline,
        partition=found.plan.partition,
        saved=saved,
    )
    write_atomic(attempt.training, render_training(own))
    command = tuple(
        str(attempt.training) if word == str(run.training) else word for word in found.plan.command
    )
    write_plan(attempt.plan, replace(found.plan, command=command))

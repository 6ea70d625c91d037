"""Makes the files of an attempt: its plan, its training, its folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence, Tuple

from varuna_core.morph.layout import build_attempt
from varuna_core.morph.orders import get_seat
from varuna_core.morph.words import Start
from varuna_core.records.files import is_listed, write_atomic
from varuna_core.records.plan import Plan, write_plan
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import Training, render_training


def pick_nodes(plan: Plan, training: Training, nodes: Sequence[str]) -> Tuple[str, ...]:
    """Those of these nodes that an attempt would use, in the order of its plan."""
    assert plan.morphing is not None
    ordered = sorted(nodes, key=get_seat)[: plan.morphing.max_nodes]
    by_seat = {get_seat(node): node for node in ordered}
    found = build_attempt(plan, training, sorted(by_seat))
    return () if found is None else tuple(by_seat[seat] for seat in found.seats)


def make_attempt(run: RunFolder, plan: Plan, training: Training, start: Start) -> None:
    """Its folder with its plan, which lands last; nothing where it is there already."""
    attempt = run.attempt(start.attempt)
    attempt.make()
    if is_listed(attempt.plan):
        return
    found = build_attempt(plan, training, [get_seat(node) for node in start.nodes])
    assert found is not None, "the nodes were chosen because a plan fits them"
    own = replace(training, pipeline=found.plan.pipeline, partition=found.partition)
    write_atomic(attempt.training, render_training(own))
    command = tuple(
        str(attempt.training) if word == str(run.training) else word for word in found.plan.command
    )
    write_plan(attempt.plan, replace(found.plan, command=command))

"""Layouts as the planner plans them: each where its ranks lie, with its order of actions."""

from __future__ import annotations

from benchmarks.simulator.layouts import Launch, Layout
from varuna_core.planner.model.cluster import place_in_turn
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.search.search import Candidate
from varuna_core.planner.search.several import make_chain, settle
from varuna_core.planner.search.space import Option


def make_tables(profile: Profile, launch: Launch) -> Tables:
    training = TrainingModel(
        batch=launch.batch, weight_bytes=4, state_bytes=8, framework_bytes=0, memory_share=1.0
    )
    return Tables(profile, training)


def plan(tables: Tables, launch: Launch, layout: Layout) -> Candidate:
    """With several stages a rank the order is that for the costs of these tables."""
    shape = Shape(
        tensor=1, replicas=layout.replicas, micro_batch=layout.micro_batch, zero=layout.zero
    )
    option = Option(
        shape=shape,
        schedule=layout.schedule,
        recompute=layout.recompute,
        num_microbatches=tables.training.count_micro_batches(layout.replicas, layout.micro_batch),
    )
    placed = place_in_turn(launch.node_kinds, layout.ranks, 1, layout.replicas)
    if layout.stages_per_rank == 1:
        return Candidate(option=option, placed=placed, bounds=layout.bounds, step_s=0.0)
    chain = make_chain(tables, option, placed, layout.stages_per_rank)
    found = settle(option, chain, layout.bounds, is_given=True)
    assert found is not None, "memory is not scarce here"
    return found

"""Seats for nodes that come later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.morph.layout import build_attempt, count_asked
from varuna_core.records.morphing import (
    Join,
    JoinJob,
    add_joins,
    read_join_job,
    read_joins,
    reserve_seats,
    write_join_job,
)
from varuna_core.records.plan import MorphPlan, Plan
from varuna_core.records.runfolder import MorphFolder
from varuna_core.records.training import derive_facts

LIMITS = MorphPlan(min_nodes=1, max_nodes=99, requeue=False, save_s=5)


def base(count: int = 2, ranks: int = 1) -> Plan:
    return make_plan(make_group("all", count, ranks), morph=True, morphing=LIMITS)


def build(plan: Plan, count: int, ranks: int, joins: Sequence[Join]) -> Join:
    wide = add_joins(plan, joins)
    group = make_group(
        f"join{len(joins)}", count, ranks, first_node=wide.num_nodes, first_rank=wide.world
    )
    return Join(number=len(joins), group=group, asked=1.0, host="h", pid=1, pid_start="2")


def test_two_who_ask_at_once_get_different_seats(tmp_path: Path) -> None:
    folder, plan = MorphFolder(tmp_path / "morph"), base()
    seen = []

    def build_late(joins: Sequence[Join]) -> Join:
        """Between our look and our file somebody else is faster, once."""
        seen.append(len(joins))
        if len(seen) == 1:
            reserve_seats(folder, lambda found: build(plan, 3, 1, found))
        return build(plan, 1, 1, joins)

    mine = reserve_seats(folder, build_late)
    assert seen == [0, 1] and list(mine.seats) == [5]
    assert read_joins(folder) == [build(plan, 3, 1, []), mine]
    assert os.stat(folder.join(0)).st_mode & 0o777 == 0o600


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = MorphFolder(tmp_path / "morph")

    def refuse(joins: Sequence[Join]) -> Join:
        raise ValueError("too many")

    with pytest.raises(ValueError, match="too many"):
        reserve_seats(folder, refuse)
    assert read_joins(folder) == [] and os.listdir(folder.joins) == []


def test_what_became_of_a_join_in_the_scheduler(tmp_path: Path) -> None:
    folder = MorphFolder(tmp_path / "morph")
    join = reserve_seats(folder, lambda joins: build(base(), 1, 1, joins))
    assert read_join_job(folder, join) is None
    write_join_job(folder, join, JoinJob(job="12"))
    assert read_join_job(folder, join) == JoinJob(job="12") and read_joins(folder) == [join]
    folder.join_job(0).write_text('{"colour": "red"}')
    assert read_join_job(folder, join) is None


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4])), max_size=4),
    st.data(),
)
def test_a_wide_plan_is_the_plan_with_more_behind_it(
    count: int, jobs: list[tuple[int, int]], data: st.DataObject
) -> None:
    plan, joins = base(count, 2), list[Join]()
    for nodes, ranks in jobs:
        joins.append(build(plan, nodes, ranks, joins))
    wide = add_joins(plan, joins)
    assert wide.groups[: len(plan.groups)] == plan.groups and count_asked(wide) == count
    seats = [seat for join in joins for seat in join.seats]
    assert seats == list(range(count, wide.num_nodes))
    ranks_of = [rank for index in range(wide.num_nodes) for rank in wide.node(index).ranks]
    assert ranks_of == list(range(wide.world))
    training = replace(GPT, layers=8, global_batch_size=16, micro_batch_size=2, partition=None)
    training = replace(training, pipeline=plan.pipeline, schedule="1f1b")
    some = data.draw(st.lists(st.sampled_from(range(wide.num_nodes)), unique=True, min_size=1))
    found = build_attempt(wide, derive_facts(training), some)
    assert found is not None and set(found.seats) <= set(some)
    assert found.plan.world == found.plan.pipeline * found.plan.data
    if sorted(some) == list(range(count)):
        assert found.plan == replace(plan, morphing=found.plan.morphing)

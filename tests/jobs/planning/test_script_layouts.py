"""Layouts of a script for the nodes that it may have: by a profile, or by data sheets."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.planning.test_plan_command import put_profile
from varuna_core.facts.partition import Partition
from varuna_core.morph.layout import build_attempt
from varuna_core.records.plan import Plan
from varuna_core.records.rank_map import decode_stage_map
from vjob.jobs.planning.inputs import read_open_conf
from vjob.jobs.planning.resolve_auto import Chosen, choose_layout, resolve_conf
from vjob.jobs.planning.script_layouts import choose_by_speed, deal_layers
from vjob.jobs.submit.submit import prepare

CONF = """
name: own
program: {script: train.py}
train: {global_batch_size: 16, micro_batch_size: 2, precision: bf16}
parallel: {pipeline: 4, partition: 6-6-2-2, schedule: 1f1b}
cluster:
  scheduler: slurm
  hetero: split
  nodes:
    - {group: fast, count: 1, gpus: "a100-40:2"}
    - {group: slow, count: 2, gpus: "a10:1"}
morph: {enabled: true}
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    return path


def choose(conf: Path, *overrides: str) -> Chosen:
    return choose_layout(read_open_conf(conf, overrides))


def plan(conf: Path) -> Plan:
    return prepare(resolve_conf(conf, []), for_preview=True).plan


speeds = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=5)


@given(speeds, st.integers(0, 6))
def test_no_other_cut_is_faster(stages: list[float], more: int) -> None:
    layers = len(stages) + more
    counts = deal_layers(layers, stages)
    assert sum(counts) == layers and min(counts) >= 1

    def took(some: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(some, stages, strict=True))

    every = itertools.product(range(1, more + 2), repeat=len(stages))
    best = min(took(some) for some in every if sum(some) == layers)
    assert took(tuple(counts)) == best


@given(
    st.lists(st.sampled_from([1.0, 4.0]), max_size=8),
    st.integers(1, 10),
    st.none() | st.integers(1, 9),
    st.integers(1, 6),
)
def test_a_layout_fits_its_ranks_its_layers_and_its_batch(
    ranks: list[float], layers: int, micro_batches: int | None, pipeline: int
) -> None:
    found = choose_by_speed(ranks, layers, micro_batches, pipeline)
    if found is None:
        assert not ranks
        return
    depth, replicas, partition = found
    parts = Partition.parse(partition).counts
    assert len(parts) == depth <= layers and sum(parts) == layers and min(parts) >= 1
    assert replicas >= 1 and depth * replicas <= len(ranks)
    assert depth >= min(pipeline, len(ranks), layers)
    assert micro_batches is None or replicas <= micro_batches
    if micro_batches is None:
        assert depth == min(pipeline, len(ranks), layers)


def test_fewer_nodes_of_several_kinds_have_stages_by_their_speed(conf: Path) -> None:
    whole = plan(conf)
    assert whole.morphing is not None and whole.morphing.facts is not None
    assert whole.layouts is not None and "a100-40/2*1,a10/1*1" in whole.layouts
    found = build_attempt(whole, whole.morphing.facts, [0, 2])
    assert found is not None and found.plan.partition is not None
    own = found.plan
    assert (own.pipeline, own.data, own.planned) == (3, 1, "planned at submit for these nodes")
    parts = Partition.parse(found.plan.partition).counts
    assert sum(parts) == 16 and parts[0] == parts[1] > 2 * parts[2]
    assert decode_stage_map(own.stage_map) == [[0], [1], [2]]
    slow = build_attempt(whole, whole.morphing.facts, [1, 2])
    assert slow is not None and slow.plan.partition == "8-8"
    all_there = build_attempt(whole, whole.morphing.facts, [0, 1, 2])
    assert all_there is not None and all_there.plan.partition == "6-6-2-2"


def test_a_profile_says_it_better(conf: Path) -> None:
    conf.write_text(CONF.replace("6-6-2-2", "3-3-1-1").replace("a10:1", "a100-40:1"))
    profile = put_profile(conf.parent)
    assert choose(conf).layouts is None, "one type, and no profile that the conf names"
    chosen = choose(conf, f"parallel.profile={profile}")
    assert chosen.layouts is not None and chosen.layout_steps
    assert set(chosen.layouts) < set(chosen.layout_steps)
    for depth, replicas, partition in chosen.layouts.values():
        assert (
            sum(Partition.parse(partition).counts) == 8
            and len(Partition.parse(partition).counts) == depth
        )
        assert replicas >= 1
    blocks = choose(conf, f"parallel.profile={profile}", "parallel.partition=2-3-1-0")
    assert blocks.layouts is not None, "as the conf spells it, without the ends"
    assert {sum(Partition.parse(cut).counts) for _, _, cut in blocks.layouts.values()} == {6}


def test_nothing_is_planned_where_it_would_be_a_guess(
    conf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(conf, "parallel.partition=auto").layouts is None, "what can be cut is not known"
    assert choose(conf, "morph.enabled=false").layouts is None
    assert choose(conf, "parallel.order=pipeline").layouts is None
    assert not caplog.messages
    conf.write_text(CONF.replace("a10:1", "unheard:1"))
    assert choose(conf).layouts is None
    assert "layouts for other numbers of nodes are not chosen by speed" in caplog.text

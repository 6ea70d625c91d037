"""Layouts for the nodes that a run will have: planned at submit, read where there is no numpy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs.planning.test_plan_command import NAME, put_profile
from varuna_core.morph.gain import forecast
from varuna_core.morph.layout import build_attempt
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import NodeKind, place_in_turn
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.search.partition import is_allowed
from varuna_core.records.plan import read_plan
from varuna_core.records.rank_map import decode_stage_map
from varuna_core.records.runfolder import make_run_folder
from varuna_core.records.training import derive_facts, read_training
from vjob.jobs.planning.inputs import read_open_conf
from vjob.jobs.planning.question import PlanOptions, load_question
from vjob.jobs.planning.resolve_auto import KEYS, Chosen, choose_layout, resolve_conf
from vjob.jobs.submit.submit import prepare, write_run_folder

CONF = """
name: tiny
program: pretrain_gpt
model: {layers: 6, hidden: 1024, heads: 8, vocab: 32000}
data: {synthetic: true}
train:
  {global_batch_size: 15, steps: 1000, precision: bf16, checkpoint: {folder: ckpt}}
parallel: {pipeline: 2, schedule: 1f1b, recompute: none}
cluster:
  scheduler: slurm
  nodes: [{group: all, count: 3, gpus: "a10:2"}]
morph: {enabled: true}
"""


def choose(conf: Path, overrides: Sequence[str]) -> Chosen:
    return choose_layout(read_open_conf(conf, overrides))


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    return path


def test_each_number_of_nodes_has_its_best_layout(conf: Path) -> None:
    """Of all depths, replicas and cuts; micro-batches are dealt out whole."""
    profile = put_profile(conf.parent)
    chosen = choose(conf, [])
    assert chosen.layouts is not None and set(chosen.layouts) == {"a10/2*1", "a10/2*2"}
    asked = PlanOptions(prices={}, profile=profile)
    question = load_question(read_open_conf(conf, []).conf, KEYS, conf.parent, asked)
    tables = Tables(question.profile, question.training)
    for count in (1, 2):
        nodes = list(question.cluster.kinds) * count
        times = {}
        for stages, replicas in itertools.product(range(1, 5), range(1, 5)):
            if stages * replicas > 2 * count:
                continue
            shape = Shape(tensor=1, replicas=replicas, micro_batch=1)
            placed = place_in_turn(nodes, stages, 1, replicas)
            chain = Chain(
                tables,
                shape,
                placed,
                build_schedule_model("1f1b", stages, -(-15 // replicas), "none"),
            )
            for cuts in itertools.combinations(range(1, 8), stages - 1):
                bounds = (0, *cuts, 8)
                if is_allowed(chain, bounds):
                    counts = "-".join(str(e - a) for a, e in itertools.pairwise(bounds))
                    times[stages, replicas, counts] = chain.compute_step(bounds)
        found = chosen.layouts[f"a10/2*{count}"]
        assert times[found] == pytest.approx(min(times.values()), rel=1e-9)
        assert chosen.layout_steps is not None
        assert chosen.layout_steps[f"a10/2*{count}"] == pytest.approx(times[found], rel=1e-9)
    assert chosen.layout_steps is not None and chosen.prediction is not None
    assert chosen.layout_steps["a10/2*3"] == chosen.prediction.step_s, "of all nodes too"


def test_an_attempt_has_what_was_planned_for_its_nodes(conf: Path, tmp_path: Path) -> None:
    put_profile(conf.parent)
    ready = prepare(resolve_conf(conf, []), for_preview=True)
    run = make_run_folder(tmp_path / "run")
    write_run_folder(ready, run)
    plan, facts = read_plan(run.plan), derive_facts(read_training(run.training))
    assert plan is not None and plan.layouts is not None
    fewer = forecast(plan, facts, [0, 1, 2], [0, 2])
    assert fewer is not None and fewer.is_predicted and plan.layout_steps is not None
    assert fewer.ratio == plan.layout_steps["a10/2*2"] / plan.layout_steps["a10/2*3"]
    found = build_attempt(plan, facts, [0, 2])
    assert found is not None
    own, (pipeline, data, partition) = found.plan, plan.layouts["a10/2*2"]
    assert (own.pipeline, own.data, own.partition) == (pipeline, data, partition)
    assert own.planned == "planned at submit for these nodes"
    ranks = [rank for ranks in decode_stage_map(own.stage_map) for rank in ranks]
    assert ranks == list(range(own.world)), "replicas of a stage adjoin, as the planner laid them"
    less = replace(plan, layouts={"a10/2*1": plan.layouts["a10/2*1"]})
    without = build_attempt(less, facts, [0, 2])
    assert without is not None and without.plan.partition == plan.partition, "at the same depth"
    assert without.plan.planned is not None and "no layout was planned" in without.plan.planned
    whole = build_attempt(plan, facts, [0, 1, 2])
    assert whole is not None and whole.plan == plan


def test_with_zero_3_all_replicas_have_as_many_micro_batches(conf: Path, tmp_path: Path) -> None:
    put_profile(conf.parent)
    ready = prepare(resolve_conf(conf, ["parallel.zero=3"]), for_preview=True)
    run = make_run_folder(tmp_path / "run")
    write_run_folder(ready, run)
    plan, facts = read_plan(run.plan), derive_facts(read_training(run.training))
    assert plan is not None and plan.layouts and facts.is_even and facts.micro_batches
    assert not any(facts.micro_batches % data for _, data, _ in plan.layouts.values())
    less = build_attempt(replace(plan, layouts={}), facts, [0])
    assert less is not None and not facts.micro_batches % less.plan.data


def test_nothing_is_planned_for_later_where_it_would_not_be_read(conf: Path) -> None:
    assert choose(conf, []).layouts is None, "without a profile"
    put_profile(conf.parent)
    assert choose(conf, ["parallel.order=pipeline", "parallel.pipeline=6"]).layouts is None
    assert choose(conf, ["morph.enabled=false"]).layouts is None
    grown = choose(conf, ["morph={enabled: true, min_nodes: 2, max_nodes: 4}"])
    assert grown.layouts is not None and set(grown.layouts) == {"a10/2*2", "a10/2*4"}
    assert NAME in grown.why


def test_ranks_lie_one_after_another() -> None:
    """Three replicas on nodes of four: the second stage begins where the first one ends."""
    node = NodeKind(name="a", gpu="A10", gpus=4, count=1)
    placed = place_in_turn([node] * 3, 4, 1, 3)
    groups = [[count for _, count in site.group] for site in placed.sites]
    assert groups == [[3], [1, 2], [2, 1], [3]]
    assert [site.sharing for site in placed.sites] == [1, 2, 2, 1], "two sums on one link"
    shared = place_in_turn([node] * 2, 2, 2, 2)
    assert [site.sharing for site in shared.sites] == [2, 2]
    with pytest.raises(PlanningError, match="need more GPUs"):
        place_in_turn([node] * 2, 3, 1, 3)

"""plan.json: what is written comes back the same, and ranks find their nodes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import make_container, make_group, make_plan
from varuna_core.records.plan import (
    MorphPlan,
    parse_plan,
    parse_prediction,
    read_facts,
    read_plan,
    render_plan,
    write_plan,
)
from varuna_core.records.rank_map import decode_stage_map, encode_stage_map
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import TrainingFacts

MIXED = make_plan(
    make_group("big", 1, 4, gpus=4, gpu_type="a100", devices=(4, 5, 6, 7), memory_gb=0),
    make_group("small", 2, 2, env={"NCCL_P2P_DISABLE": "1"}),
    command=("python", "it's\n$(x) 모델"),
    containers=(replace(make_container("enroot"), prepare=(("a", "b"), ("c",)), step=("-e",)),),
    must_exist=("/data",),
    port=61234,
)


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", MIXED)
    assert read_plan(tmp_path / "plan.json") == MIXED
    assert parse_plan(json.loads(render_plan(MIXED))) == MIXED


def test_a_plan_is_private_for_its_environment_may_be_secret(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", MIXED)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}'])
def test_what_is_no_plan_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(tmp_path / "plan.json") is None
    assert read_plan(tmp_path / "absent.json") is None


def test_nodes_and_ranks_are_counted_through_the_groups() -> None:
    assert (MIXED.world, MIXED.num_nodes) == (8, 3)
    assert [list(MIXED.node(index).ranks) for index in range(3)] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    for index in range(3):
        assert all(MIXED.node_of_rank(rank).index == index for rank in MIXED.node(index).ranks)
    assert MIXED.node(2).group.name == "small"
    with pytest.raises(IndexError):
        MIXED.node(3)
    with pytest.raises(IndexError):
        MIXED.node_of_rank(8)


def test_the_stage_map_is_varunas() -> None:
    stages = [[0, 3], [1, 4], [2, 5]]
    assert encode_stage_map(stages) == "0,3;1,4;2,5;"
    assert decode_stage_map("0,3;1,4;2,5;") == stages


def test_a_prediction_is_written_as_far_as_it_is_known() -> None:
    costs = {"forward": [0.1, 0.05], "hops": [0.01]}
    said = {"step_s": 1.5, "stage_s": [0.5, 0.25], "memory_mb": [910.0, 870.0], "gpu": "A10"}
    said["costs"] = costs
    found = parse_prediction(said)
    assert found is not None and found.as_json() == {
        **said,
        "stage_s": (0.5, 0.25),
        "memory_mb": (910.0, 870.0),
        "costs": {"forward": (0.1, 0.05), "hops": (0.01,)},
    }
    plan = replace(MIXED, prediction=found)
    assert json.loads(render_plan(plan))["prediction"] == said
    assert parse_plan(json.loads(render_plan(plan))) == plan


@pytest.mark.parametrize("value", [None, [], {}, {"step_s": "x", "stage_s": [1, None]}])
def test_a_prediction_that_makes_no_sense_is_none(value: Any) -> None:
    assert parse_prediction(value) is None


def test_a_plan_whose_machine_list_stood_with_the_limits_is_read() -> None:
    limits = MorphPlan(min_nodes=1, max_nodes=4, requeue=True, save_s=30.0)
    plan = replace(MIXED, morph=True, morphing=limits)
    value = json.loads(render_plan(plan))
    for name in ("machine_list", "ssh_config"):
        del value[name]
    del value["morphing"]["facts"]
    value["traces"] = None  # which no plan has any more
    value["morphing"].update(machine_list="/runs/machines", ssh_config=None)
    assert parse_plan(value) == replace(plan, machine_list="/runs/machines")


def test_the_facts_of_a_run_are_those_of_its_plan_else_of_its_training(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    facts = TrainingFacts("script", 12, 8, "1f1b", 100, "/ckpt")
    limits = MorphPlan(min_nodes=1, max_nodes=4, requeue=False, save_s=9.0, facts=facts)
    assert read_facts(run, replace(MIXED, morphing=limits)) == facts
    for morphing in (None, replace(limits, facts=None)):
        with pytest.raises(ValueError):
            read_facts(run, replace(MIXED, morphing=morphing))

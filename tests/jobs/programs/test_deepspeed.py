"""DeepSpeed from a conf: the file that it reads, its launcher's places, and real runs on CPU.

The real runs want an interpreter with DeepSpeed: VJOB_DEEPSPEED_PYTHON, or this one if it has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import Vjob
from tests.deepspeed_run import CONF, check_runs, find_python
from tests.jobs.confs import make_conf
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.errors import InputError
from vjob.jobs.programs import deepspeed
from vjob.jobs.programs.start import ProgramFiles
from vjob.jobs.submit.build_plan import PlanContext, build_plan

HEAD = "name: x\nprogram: {deepspeed: train.py}\n"
CLUSTER = "cluster: {nodes: [{group: a, count: 2, gpus: 4}]}\n"
JSON_VALUES = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)
CONFIGS = st.dictionaries(st.sampled_from("abcd"), JSON_VALUES)


def build(text: str = "", own: dict[str, Any] | None = None) -> dict[str, Any]:
    conf = make_conf(HEAD + CLUSTER + text)
    assert check_conf(conf, {}, require_paths=False) == []
    return deepspeed.build_config(conf, own or {}, replicas=8)


def test_the_conf_makes_a_whole_configuration() -> None:
    found = build(
        "train: {micro_batch_size: 2, global_batch_size: 64, precision: fp16}\n"
        "parallel: {zero: 2, recompute: full}\n"
    )
    batch = {key: found[key] for key in deepspeed.BATCH_KEYS}
    assert list(batch.values()) == [64, 2, 4]
    assert found["zero_optimization"]["stage"] == 2
    assert found["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert found["fp16"] == {"enabled": True, "loss_scale": 0}
    assert "partition_activations" in found["activation_checkpointing"]
    assert "torch_adam" not in found["optimizer"]["params"] and "scheduler" not in found


def test_the_users_file_wins_key_by_key_and_auto_is_the_conf() -> None:
    own = {
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 7},
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": 1e-6}},
        "flops_profiler": {"enabled": True, "unknown": "auto"},
    }
    found = build("parallel: {zero: 1}\ntrain: {global_batch_size: 16, micro_batch_size: 2}\n", own)
    assert found["zero_optimization"]["stage"] == 1
    assert found["zero_optimization"]["reduce_bucket_size"] == 7
    assert found["train_micro_batch_size_per_gpu"] == 2
    assert found["optimizer"]["type"] == "Adam"
    assert found["optimizer"]["params"]["lr"] == 0.00015
    assert found["optimizer"]["params"]["eps"] == 1e-6
    assert found["flops_profiler"] == {"enabled": True}


def test_a_file_that_says_the_batch_is_not_completed_by_the_conf() -> None:
    found = build("train: {global_batch_size: 64}\n", {"train_micro_batch_size_per_gpu": 4})
    assert "train_batch_size" not in found and found["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3}, "not a multiple of 24"),
        (dict.fromkeys(deepspeed.BATCH_KEYS, 2), "is not train_micro_batch_size_per_gpu 2 x"),
        ({"train_batch_size": "many"}, "whole numbers above 0"),
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3, but parallel.zero is 1"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(own: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        build("parallel: {zero: 1}\n", own)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_file_that_is_no_object_is_named(text: str) -> None:
    with pytest.raises(InputError, match=r"program.config ds.json"):
        deepspeed.parse_config(text, "ds.json")


@given(CONFIGS, CONFIGS)
def test_merging_keeps_every_key_and_theirs_wins(ours: dict[str, Any], own: dict[str, Any]) -> None:
    found = deepspeed.merge(ours, own)
    assert found.keys() == ours.keys() | own.keys()
    assert deepspeed.merge(found, own) == found
    for key, value in own.items():
        if not isinstance(value, dict):
            assert found[key] == value


def test_a_script_gets_what_deepspeeds_own_launcher_gives_it() -> None:
    conf = make_conf(HEAD + "cluster: {nodes: [{group: a, ranks: 3}]}\nenv: {DS_ACCELERATOR: x}\n")
    plan = build_plan(conf, make_surroundings())
    script, *args = plan.command[2:]
    assert script.endswith("/train.py")
    assert args == [
        "--local_rank=%{local_rank}",
        "--deepspeed",
        "--deepspeed_config",
        "/log/r/ds_config.json",
    ]
    assert plan.groups[0].env == {"LOCAL_SIZE": "3"}
    assert plan.env == {"DS_ACCELERATOR": "x"}, "the conf's own comes over ours"


def test_a_script_that_takes_the_file_by_another_option_says_where() -> None:
    text = 'name: x\nprogram: {deepspeed: t.py, args: [--deepspeed, "{ds_config}", "%{rank}"]}\n'
    plan = build_plan(make_conf(text), make_surroundings())
    assert plan.command[4:] == ("--deepspeed", "/log/r/ds_config.json", "%{percent}{rank}")
    assert plan.env == {"DS_ACCELERATOR": "cpu"}


def make_surroundings() -> PlanContext:
    return PlanContext(
        run="r",
        scheduler="local",
        python="python3",
        base="/",
        user_id=1,
        environ={},
        folder="/log/r",
        found=ProgramFiles(),
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("parallel: {zero: 2, pipeline: 2}\n", "parallel.zero"),
        ("parallel: {recompute: offload}\n", "parallel.recompute"),
        ("program: {deepspeed: t.py, args: [--deepspeed_config, a.json]}\n", "program.args"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_by_its_key(text: str, key: str) -> None:
    head = "name: x\n" if text.startswith("program") else HEAD
    problems = check_conf(make_conf(head + CLUSTER + text), {}, require_paths=False)
    assert [problem.key for problem in problems] == [key]


@pytest.mark.slow
def test_deepspeed_trains_on_this_machine(tmp_path: Path) -> None:
    """In ZeRO's first stage; the lab's test has the second one."""
    vjob = Vjob(tmp_path)
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"reduce_bucket_size": 5000}})
    )
    run = vjob.submit(
        CONF.format(python=find_python(), stage=1, scheduler="local", count=1, ranks=2)
    )
    check_runs(vjob, run, 1)

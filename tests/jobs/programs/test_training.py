"""A conf with a built-in program becomes what its ranks are to train."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import Vjob, read_out
from tests.jobs.conf.test_check import find_problems
from tests.jobs.confs import BASE, make_conf, make_plan
from tests.reports.traces import read_rank_lines
from tests.varuna_core.programs.trainings import GPT
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training, render_training
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.paths import join_blend, split_blend
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.programs.training import build_training, name_model

XL = """
name: xl
program: pretrain_gpt
model: gpt2-xl
data: {prefix: data/xl, split: "900,50,50"}
train: {steps: 500, micro_batch_size: 2, schedule: {warmup_steps: 5}}
parallel: {pipeline: 8, partition: 0-11-8-8-8-8-5-0}
cluster: {nodes: [{group: a, count: 8, gpus: "a10:4"}]}
"""


def test_every_default_is_settled() -> None:
    conf = make_conf(XL)
    training = build_training(conf, make_plan(conf).data)
    assert training is not None
    assert (training.model, training.layers, training.vocab) == ("gpt2-xl", 48, 50257)
    assert training.data == ((1.0, "/home/u/exp/data/xl"),)
    assert training.global_batch_size == 2 * 4 * 8
    assert training.decay_steps == 500 and training.warmup_steps == 5
    assert training.partition == "0-11-8-8-8-8-5-0" and training.pipeline == 8
    auto = build_training(replace(conf, parallel=replace(conf.parallel, partition="auto")), 4)
    assert auto is not None and auto.partition is None


def test_a_script_has_none() -> None:
    assert build_training(make_conf("name: a\nprogram: {script: t.py}\n"), 1) is None


def test_ranks_run_what_lies_in_the_run_folder() -> None:
    plan = make_plan(make_conf(XL), run="r")
    assert plan.command == (
        "/opt/vjob/bin/python", "-u", "/log/r/program.pyz", "/log/r/training.json",
    )  # fmt: skip
    assert "/log/r/program.pyz" not in plan.must_exist


def test_apex_is_looked_for_on_the_nodes_where_a_run_cannot_do_without() -> None:
    for value, names in (("true", ["amp_C", "apex"]), ("auto", []), ("false", [])):
        conf = make_conf(XL.replace("steps: 500,", f"steps: 500, optimizer: {{apex: {value}}},"))
        plan = make_plan(conf, run="r")
        assert [name for name, _ in plan.modules] == names
        assert all("set it to auto or false" in remedy for _, remedy in plan.modules)
        training = build_training(conf, 4)
        assert training is not None and str(training.apex).lower() == value


def test_torchao_is_looked_for_where_layers_are_in_float8() -> None:
    plan = make_plan(make_conf(XL.replace("steps: 500,", "steps: 500, precision: fp8,")), run="r")
    assert [name for name, _ in plan.modules] == ["torchao"]
    assert "pip install 'vjob[fp8]'" in plan.modules[0][1]


def test_a_shape_has_its_name_whatever_its_dropout() -> None:
    conf = make_conf(XL)
    assert conf.model is not None
    assert name_model(replace(conf.model, dropout=0.0)) == "gpt2-xl"
    assert name_model(replace(conf.model, layers=3)) == "3x1600"


def test_a_training_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    for training in (GPT, replace(GPT, data=((0.5, "/a b"), (2.0, "/c")), loss_scale=64.0)):
        path.write_text(render_training(training))
        assert read_training(path) == training
    value = json.loads(render_training(GPT))
    for broken, says in (
        ({**value, "format": 9}, "is not a training.json of this version"),
        ({**value, "more": 1}, "has missing or unknown keys: more"),
        ([], "is not a training.json"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=says):
            read_training(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_training(path)


prefixes = st.text("ab/ .-", min_size=1).map(lambda text: "/" + text.strip())
weights = st.floats(0.001, 1e6).map(lambda weight: f"{weight:g}".replace("+", ""))


@given(st.lists(st.tuples(weights, prefixes), min_size=2, max_size=4))
def test_a_blend_is_split_as_it_was_joined(blend: list[tuple[str, str]]) -> None:
    assert split_blend(join_blend(blend)) == blend


def test_one_prefix_may_hold_spaces_and_numbers_and_a_blend_is_made_absolute() -> None:
    assert split_blend("/my 3 runs/a") == [("1", "/my 3 runs/a")]
    conf = make_conf(XL.replace("data/xl", "0.7 data/a 3 ~/b"))
    assert conf.data is not None and conf.data.prefix is not None
    assert conf.data.prefix.startswith(f"0.7 {BASE}/data/a 3 /")


def test_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx", "b.bin"):
        (tmp_path / name).touch()

    def find(data: str, more: str = "") -> list[tuple[str, str]]:
        text = f"name: x\nprogram: pretrain_bert\nmodel: bert-large\ndata: {data}\n{more}"
        conf: JobConf
        conf, lines = parse_conf_lines(text, "c", tmp_path, environ={})
        found = check_conf(conf, lines, base=tmp_path)
        return [(item.key, item.message.replace(str(tmp_path), "")) for item in found]

    assert find("{prefix: a, vocab: a.bin}") == []
    assert find("{prefix: a, vocab: v.txt}") == [("data.vocab", "is not a file")]
    assert ("data.prefix", "/b.idx not found") in find("{prefix: 1 a 2 b, vocab: a.bin}")
    inside = "container: {image: 'docker://x', mounts: ['/d:/data']}\n"
    assert find("{prefix: /data/b, vocab: /data/v}", inside) == []


def test_a_built_in_program_is_checked_against_what_it_trains() -> None:
    head = "name: run\nprogram: pretrain_bert\nmodel: bert-large\n"
    for text, problem in (
        ("data: {prefix: a}", "c:4: data.vocab = null: is required by pretrain_bert"),
        (
            "data: {prefix: 1 a 2 b, vocab: v}",
            "data.prefix = 1 /conf/a 2 /conf/b: pretrain_bert reads one",
        ),
        (
            "train: {compile: true}\nparallel: {zero: 3, schedule: 1f1b}",
            "parallel.zero = 3: conflicts with train.compile",
        ),
        (
            "train: {optimizer: {name: lamb}}\nparallel: {zero: 3}",
            "parallel.zero = 3: splits tensors",
        ),
        (
            "train: {optimizer: {offload: true, apex: true}}",
            "train.optimizer.offload = True: conflicts with train.optimizer.apex",
        ),
        ("parallel: {tensor: 3}", "parallel.tensor = 3: must divide the model's 16 heads"),
        (
            "parallel: {tensor: 2}\ntrain: {optimizer: {name: lamb}}",
            "train.optimizer.name = lamb: needs whole weights",
        ),
        (
            "parallel: {tensor: 2, schedule: 1f1b}\ntrain: {compile: true}",
            "train.compile = True: conflicts with parallel.tensor above 1",
        ),
        (
            "parallel: {tensor: 2, sequence_parallel: true}",
            "parallel.sequence_parallel = True: is for pretrain_gpt",
        ),
        (
            "train: {schedule: {warmup_steps: 9, decay_steps: 8}}",
            "train.schedule.decay_steps = 8: must be at least train.schedule.warmup_steps, 9",
        ),
    ):
        text += "" if text.startswith("data") else "\ndata: {synthetic: true}"
        problems = find_problems(text + "\n", head=head)
        assert any(problem in found for found in problems), (text, problems)


def test_a_sequence_is_shared_evenly_by_several_ranks() -> None:
    head = "name: run\nprogram: pretrain_gpt\ndata: {synthetic: true}\n"
    model = "model: {layers: 2, hidden: 16, heads: 4, sequence: 17, vocab: 64}\n"
    for tensor, problem in (
        (1, "needs parallel.tensor above 1"),
        (2, "must divide model.sequence, 17"),
    ):
        text = f"{model}parallel: {{tensor: {tensor}, sequence_parallel: true}}\n"
        assert any(problem in found for found in find_problems(text, head=head)), problem


CONF = """
name: tiny
program: pretrain_gpt
model: {layers: 2, hidden: 16, heads: 2, sequence: 16, vocab: 64}
data: {synthetic: true}
train: {steps: 4, log_every: 2, evaluate: {every: 4, steps: 1}, global_batch_size: 4}
parallel: {pipeline: 2, partition: 1-1}
cluster: {scheduler: local, nodes: [{group: a, ranks: 2}]}
"""


@pytest.mark.timeout(200)
def test_submit_trains_and_leaves_lines_and_traces(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    vjob = Vjob(tmp_path, {"OMP_NUM_THREADS": "1"})
    run: RunFolder = vjob.submit(CONF)
    record = vjob.wait_over(run, 180)
    out = read_out(run)
    assert record["state"] == "ended" and " iteration        4/       4 |" in out, vjob.explain(run)
    assert "NNODES: 1\n" in out and "PARTITION: 1-1\n" in out
    assert "validation loss at iteration 4" in out
    assert "[Rank 0] (after 2 iterations) memory (MB) |" in out
    for rank in (0, 1):
        head, *lines = read_rank_lines(run.attempt(0).node_trace(0), rank)
        assert json.loads(head)["stages"] == [rank]
        steps = [json.loads(line) for line in lines if line.startswith('{"step"')]
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        assert {"data", "optimizer"} <= steps[0]["sums"].keys()
        assert sum('"offset"' in line for line in lines) == (2 if rank else 0)

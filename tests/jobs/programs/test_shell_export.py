"""The same confs as scripts for machines without vjob: what the recipes wrote by hand."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import Vjob
from tests.jobs.confs import make_conf
from tests.jobs.programs import recipes
from tests.jobs.programs.exported_scripts import find_free_port, run_scripts
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.errors import InputError
from vjob.jobs.programs.megatron import Checkout
from vjob.jobs.programs.shell_export import Machines, build_scripts
from vjob.jobs.programs.start import ProgramFiles

GOLDEN = ROOT / "tests/jobs/golden/external"
V1 = ProgramFiles(
    checkout=Checkout(script="/m/pretrain_gpt2.py", generation="v1", partition=None),
    config=recipes.DEEPSPEED_CONFIG,
)
RECIPES = {
    "one-machine": (recipes.ONE_MACHINE, ("localhost",)),
    "two-machines": (recipes.TWO_MACHINES, recipes.HOSTS),
    "deepspeed-one": (recipes.DEEPSPEED_ONE, ("localhost",)),
    "deepspeed-two": (recipes.DEEPSPEED_TWO, recipes.HOSTS),
}


BUILT_IN = """
name: byhand
program: pretrain_gpt
model: {{layers: 2, hidden: 16, heads: 2, sequence: 16, vocab: 64}}
data: {{synthetic: true}}
train: {{steps: 2, evaluate: {{every: 0}}}}
parallel: {{pipeline: 2}}
cluster: {{port: {port}, nodes: [{{group: a, count: 2, ranks: 1}}]}}
"""


def build(text: str, hosts: tuple[str, ...], **more: object) -> dict[str, str]:
    conf = make_conf(text)
    assert check_conf(conf, {}, require_paths=False) == []
    machines = Machines(hosts=hosts, folder="/byhand", workdir="/exp", **more)  # type: ignore[arg-type]
    return build_scripts(conf, V1, machines)


@pytest.mark.parametrize("name", RECIPES)
def test_the_scripts_of_a_recipe_are_golden(name: str) -> None:
    """VJOB_WRITE_GOLDEN=1 writes them anew; read the diff."""
    text, hosts = RECIPES[name]
    files = build(text, hosts)
    made = "".join(f"---- {file}\n{content}" for file, content in sorted(files.items()))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("VJOB_WRITE_GOLDEN"):
        path.write_text(made, encoding="utf-8")
    assert made == path.read_text(encoding="utf-8")
    for file, content in files.items():
        if file.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=content, text=True, check=True)


def read_command(script: str) -> list[str]:
    return shlex.split(script[script.index("\nexec ") :].replace("\\\n", " "))[1:]


def test_deepspeeds_launcher_gets_the_places_of_the_recipe() -> None:
    files = build(*RECIPES["deepspeed-two"])
    assert files["hostfile"] == "10.10.10.102 slots=8\n10.10.10.105 slots=8\n"
    words = read_command(files["run.sh"])
    assert words[0] == "deepspeed"
    assert "--include=10.10.10.102:4,5@10.10.10.105:4,5" in words
    assert "--master_port=6000" in words
    script = words.index("/home/u/exp/Megatron-LM/pretrain_gpt2.py")
    args = words[script + 1 :]
    assert args[:2] == ["--model-parallel-size", "2"]
    assert args[-3:] == ["--deepspeed", "--deepspeed_config", "/byhand/ds_config.json"]
    alone = read_command(files["node-1.sh"])
    assert [word for word in alone if word not in words] == ["--no_ssh", "--node_rank=1"]
    config = json.loads(files["ds_config.json"])
    assert config["zero_optimization"]["reduce_bucket_size"] == 50000000
    assert config["gradient_accumulation_steps"] == 1


def test_torchrun_gets_the_places_of_the_recipe() -> None:
    files = build(*RECIPES["two-machines"])
    assert sorted(files) == ["node-0.sh", "node-1.sh"]
    assert "export CUDA_VISIBLE_DEVICES=4,5\n" in files["node-1.sh"]
    parser = argparse.ArgumentParser()
    for name in ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"):
        parser.add_argument(f"--{name}")
    known, _ = parser.parse_known_args(read_command(files["node-1.sh"])[3:])
    assert vars(known) == {
        "nproc_per_node": "2",
        "nnodes": "2",
        "node_rank": "1",
        "master_addr": "10.10.10.102",
        "master_port": "6000",
    }


def test_an_elastic_script_is_the_same_on_every_machine() -> None:
    text = "name: e\nprogram: {script: t.py}\ncluster: {nodes: [{group: a, gpus: 2}]}\n"
    files = build(text, ("m1",), elastic=(1, 4), restarts=3)
    words = read_command(files["node.sh"])
    assert "--nnodes=1:4" in words and "--rdzv_endpoint=m1:29500" in words
    assert "--max_restarts=3" in words and not any("node_rank" in word for word in words)


def test_restarts_of_the_conf_are_torchruns_unless_others_are_asked_for(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    (tmp_path / "t.py").touch()
    text = "name: e\nprogram: {script: t.py}\ncluster: {restarts: 2, nodes: [{group: a}]}\n"
    for words, number in (((), 2), (("--restarts", "0"), 0)):
        vjob("export", vjob.write(text), "byhand", *words)
        script = (tmp_path / "byhand/node-0.sh").read_text()
        assert f"--max_restarts={number}" in read_command(script)


def test_a_script_finds_the_conf_and_the_layout_without_vjob_too(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    (tmp_path / "t.py").touch()
    text = (
        "name: e\nprogram: {script: t.py, args: ['${train.steps}']}\n"
        "train: {steps: 7, precision: bf16}\nparallel: {pipeline: 2, partition: 1-3}\n"
        "cluster: {nodes: [{group: a, ranks: 4}]}\n"
    )
    vjob("export", vjob.write(text), "byhand")
    script = (tmp_path / "byhand/node-0.sh").read_text()
    for line in ("VJOB_PRECISION=bf16", "VJOB_STAGE_MAP='0,1;2,3;'", "VJOB_PARTITION=1-3"):
        assert f"export {line}\n" in script
    assert read_command(script)[-1] == "7"


@pytest.mark.parametrize(
    ("text", "hosts", "more", "said"),
    [
        (recipes.TWO_MACHINES, ("a",), {}, "2 nodes, and 1 hosts"),
        (recipes.DEEPSPEED_ONE, ("a",), {"elastic": (1, 2)}, "keeps its nodes"),
        (recipes.ONE_MACHINE, ("a",), {"elastic": (3, 2)}, "fewest and the most"),
    ],
)
def test_what_does_not_fit_is_refused(
    text: str, hosts: tuple[str, ...], more: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        build(text, hosts, **more)


def test_references_of_a_run_that_may_morph_are_those_of_its_whole_layout() -> None:
    args = 'args: ["${parallel.pipeline}", "$${x}"]'
    text = f"""
name: own
program: {{script: train.py, {args}}}
parallel: {{pipeline: 2}}
cluster: {{nodes: [{{group: a, count: 2, ranks: 1}}]}}
morph: {{enabled: true}}
env: {{DEPTH: "${{parallel.pipeline}}"}}
"""
    script = build(text, recipes.HOSTS)["node-0.sh"]
    assert "export DEPTH=2" in script and "'${x}'" in script and "\0" not in script


def test_the_command_writes_scripts_that_run(tmp_path: Path) -> None:
    """A stand-in for python3 says what torchrun would have been told."""
    vjob = Vjob(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$NOTE" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    vjob.write(
        "name: x\nprogram: {script: t.py, args: ['a b', \"it's\"]}\n"
        "env: {NOTE: '$(id) x', MY_TOKEN: s3cret}\ncluster: {nodes: [{group: a, ranks: 2}]}\n"
    )
    (path,) = vjob("export", "conf.yaml", "by hand").stdout.splitlines()
    script = tmp_path / path
    assert script.stat().st_mode & 0o77 == 0, "it may hold secrets"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run([script], env=env, capture_output=True, text=True, check=True).stdout
    assert said.startswith("$(id) x -m torch.distributed.run --nproc_per_node=2")
    assert said.endswith("/t.py a b it's\n")
    assert (
        "--elastic nonsense"
        in vjob("export", "conf.yaml", "x", "--elastic", "nonsense", code=2).stderr
    )


def test_a_built_in_program_trains_by_hand_on_two_machines(tmp_path: Path) -> None:
    """Both are this one; torchrun, called on each, makes the world."""
    pytest.importorskip("torch", reason="torch is not installed")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    vjob = Vjob(tmp_path, {"OMP_NUM_THREADS": "1", "PATH": path})
    vjob.write(BUILT_IN.format(port=find_free_port()))
    hosts = ("--host", "127.0.0.1", "--host", "localhost")
    written = vjob("export", "conf.yaml", "byhand", *hosts).stdout.splitlines()
    names = ("training.json", "node-0.sh", "node-1.sh", "program.pyz")
    assert written == [f"byhand/{name}" for name in names]
    said = "".join(run_scripts([tmp_path / path for path in written if "node-" in path], vjob.env))
    assert " iteration        2/       2 |" in said and "WORLD_SIZE: 2\n" in said, said

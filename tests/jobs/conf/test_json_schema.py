"""`vjob schema` and `vjob init --for`: every conf here has the schema's form, and no wrong one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from tests import ROOT
from vjob.jobs.conf.document import list_sections, render_init
from vjob.jobs.conf.json_schema import build_schema
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.conf.schema import Program
from vjob.jobs.conf.starters import KINDS
from vjob.jobs.conf.write import render_resolved
from vjob.jobs.schedulers.slurm.nodes import parse_starting_nodes
from vjob.shelf.commands.cli import cli

CONFS = sorted(
    path
    for folder in ("examples", "tests/jobs/legacy", "tests/jobs/golden")
    for path in (ROOT / folder).glob("*.yaml")
)
SCHEMA = build_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
MINIMAL: dict[str, Any] = {"name": "x", "program": {"script": "t.py"}}
SINFO = """\
n1 |cpu* |idle |(null) |(null) |
n2 |gpu1 |allocated |gpu:a100:4(S:0-1) |ib |
n3 |gpu2 |idle |gpu:a10:2 |eth |
n4 |gpu2 |mixed |gpu:a10:2 |eth |
"""


def find_errors(value: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(value)]


def test_the_schema_is_one_and_is_what_the_command_prints() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    done = CliRunner().invoke(cli, ["schema"])
    assert json.loads(done.stdout) == json.loads(json.dumps(SCHEMA))


@pytest.mark.parametrize("path", CONFS, ids=lambda path: path.name)
def test_each_conf_of_the_repository_has_its_form(path: Path) -> None:
    text = path.read_text()
    assert find_errors(yaml.safe_load(text)) == []
    conf = parse_conf(text, path.name, path.parent)
    assert find_errors(yaml.safe_load(render_resolved(conf))) == []


def test_the_commented_conf_has_its_form_with_every_key_active() -> None:
    text = re.sub(r"^( *(?:- )?)#(\w+:)", r"\1\2", render_init(), flags=re.MULTILINE)
    assert text.count("\n") > 100 and find_errors(yaml.safe_load(text)) == []


def test_every_key_is_in_it_with_its_doc_line() -> None:
    for section in list_sections():
        found = SCHEMA if not section.key else SCHEMA["$defs"][section.cls.__name__]
        if section.cls is Program:
            continue
        keys = (found if "properties" in found else found["anyOf"][1])["properties"]
        assert all(one["description"] for one in keys.values()), section.key


@pytest.mark.parametrize(
    "more",
    [
        "cluster: {walltime_min: 2h, grace_s: 1m30s, nodes: [{group: a, memory_gb: 64G}]}",
        'cluster: {walltime_min: "1:30:00"}',
        "cluster:\n  walltime_min: ${train.steps}",
        "train: {optimizer: {lr: 1e-5, betas: [0.9, 0.95]}, clip_grad_norm: null}",
        "parallel: {data: auto, pipeline: 2, zero: 1}",
        'parallel: {data: "${parallel.pipeline}"}',
        "env: {A: 1, B: no, C: 12:30}\npass_env:\nprofile: {ranks: all}",
        "program: {script: t.py, args: --lr 1e-4}",
        "model: {layers: 2, hidden: 64, heads: 4}",
        "morph: {enabled: yes}",
    ],
)
def test_what_submit_takes_it_takes(more: str) -> None:
    value = {**MINIMAL, **yaml.safe_load(more)}
    assert find_errors(value) == []
    text = yaml.safe_dump({key: one for key, one in MINIMAL.items() if f"{key}:" not in more})
    assert parse_conf(f"{text}{more}\n", "conf.yaml", Path("/conf"), environ={})


@pytest.mark.parametrize(
    "more",
    [
        {"stesp": 1},
        {"train": {"stesp": 1}},
        {"train": {"steps": 0}},
        {"train": {"precision": "fp61"}},
        {"cluster": {"walltime_min": "soon"}},
        {"cluster": {"nodes": [{"count": "two"}]}},
        {"program": {"script": "a.py", "config": "ds.json"}},
        {"program": "train.py"},
        {"model": "gpt9"},
        {"train": {"optimizer": {"betas": [0.9]}}},
    ],
    ids=str,
)
def test_what_submit_refuses_it_refuses(more: dict[str, Any]) -> None:
    assert find_errors({**MINIMAL, **more})


def test_a_conf_that_includes_another_need_not_be_whole() -> None:
    assert find_errors({"include": ["a.yaml"], "train": {"steps": 3}}) == []
    assert find_errors({"train": {"steps": 3}})


def put_files(folder: Path, text: str) -> None:
    """What the first lines of a starter name."""
    for name in re.findall(r"^#   (\S+)", text, re.MULTILINE):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name == "Megatron-LM":
            path.mkdir()
            (path / "pretrain_gpt.py").touch()
            continue
        path.write_text("{}" if name.endswith(".json") else "")
        if name.endswith(".bin"):
            path.with_suffix(".idx").touch()


@pytest.mark.parametrize("has_slurm", [False, True], ids=["here", "slurm"])
@pytest.mark.parametrize("kind", ["minimal", *KINDS])
def test_a_starter_is_submitted_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, has_slurm: bool
) -> None:
    """With the files that it names, and the nodes that sinfo shows."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("sinfo", "sbatch") if has_slurm else ():
        (bin_ / name).write_text(f"#!/bin/sh\necho '{SINFO}'\n")
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    words = ["--minimal"] if kind == "minimal" else ["--for", kind]
    done = CliRunner().invoke(cli, ["init", *words])
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= 100
    value = yaml.safe_load(done.stdout)
    assert find_errors(value) == []
    group = value["cluster"]["nodes"][0]
    assert (group.get("queue"), group.get("gpus")) == (
        ("gpu2", "a10:2") if has_slurm else (None, None)
    )
    assert ("also: {group: a100, count: 1, queue: gpu1" in done.stdout) == has_slurm
    (tmp_path / "conf.yaml").write_text(done.stdout)
    put_files(tmp_path, done.stdout)
    words = ["--set", f"cluster.scheduler={'slurm' if has_slurm else 'local'}"]
    shown = CliRunner().invoke(cli, ["submit", "conf.yaml", "--dry-run", *words])
    assert shown.exit_code == 0, shown.output
    assert "# ---- node.sh" in shown.output


def test_a_starter_runs_here_where_the_commands_of_slurm_know_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submit went to sbatch, which refused it."""
    for name in ("sinfo", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "state"))
    shown = CliRunner().invoke(cli, ["init", "--minimal"]).stdout
    assert yaml.safe_load(shown)["cluster"]["scheduler"] == "local"
    assert "sinfo did not answer" in shown and max(map(len, shown.splitlines())) <= 100


def test_nodes_without_gpus_give_the_default_queue() -> None:
    (group,) = parse_starting_nodes("n0|other|idle|(null)||\nn1|cpu*|idle|(null)|(null)|\n")
    assert (group.queue, group.gpus) == ("cpu", None)
    assert parse_starting_nodes("") == []


def test_init_writes_a_conf_with_the_program_of_its_kind(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    done = CliRunner().invoke(cli, ["init", "--for", "torchtitan", str(folder)])
    assert done.exit_code == 0 and f"vjob submit {folder}/conf.yaml" in done.stdout
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"conf.yaml", "tiny/__init__.py", "tiny/train.py"}
    assert "Put these" not in (folder / "conf.yaml").read_text()
    shown = CliRunner().invoke(cli, ["submit", str(folder / "conf.yaml"), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    again = CliRunner().invoke(cli, ["init", "--for", "ddp", str(folder)])
    assert again.exit_code == 2 and "give another folder" in again.output
    assert not (folder / "train.py").exists()


def test_init_takes_one_of_its_ways() -> None:
    done = CliRunner().invoke(cli, ["init", "--minimal", "--for", "gpt"])
    assert done.exit_code != 0

"""Every key of a conf has an effect on a script or a function, or is refused: none is ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import vjob
from tests.jobs.confs import BASE, make_plan
from varuna_core.records.plan import Plan, render_plan
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import LAYOUT_VARIABLES, VARIABLES
from vjob.containers.runtime import ImageKind
from vjob.jobs.api.confs import read_source, resolve
from vjob.jobs.conf.document import render_conf_doc, render_fate
from vjob.jobs.conf.fates import (
    OF_PROGRAMS,
    Fate,
    find_default,
    find_value,
    goes_by_reference,
    judge_fate,
    list_leaves,
    reaches,
)
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.parse import get_hints, get_members, get_section_class
from vjob.jobs.conf.references import spell_value
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.conf.write import render_resolved
from vjob.jobs.errors import InputError, Problem
from vjob.jobs.programs.start import ProgramFiles, build_files
from vjob.jobs.submit.scripts import render_scripts
from vjob.jobs.submit.submit import choose_scheduler, prepare
from vjob.jobs.submit.sweep import prepare_sweep

SCRIPT = """
name: own
program: {script: train.py}
cluster: {scheduler: slurm, nodes: [{group: all, count: 2, gpus: "a100:4"}]}
"""
FUNCTION = SCRIPT.replace("{script: train.py}", "{function: train}")
IMAGE = "container={image: x.sqsh, runtime: enroot}"
WITH: Mapping[str, Sequence[str]] = {
    "cluster.hetero": ["cluster.nodes=[{group: a, gpus: 4}, {group: b, gpus: 4}]"],
    "cluster.restart_same": ["cluster.restarts=2"],
    "train.checkpoint.local": ["train.checkpoint.folder=c"],
    **{f"container.{name}": [IMAGE] for name in ("mounts", "workdir", "reuse", "writable")},
    **{f"container.{name}": [IMAGE] for name in ("remap_root", "scratch", "runtime")},
    "profile.ranks": ["profile.nsys=true"],
    "profile.options": ["profile.nsys=true"],
    **{
        f"track.wandb.{name}": ["track.wandb.project=p"]
        for name in ("entity", "mode", "group", "tags")
    },
    **{
        f"track.mlflow.{name}": ["track.mlflow.experiment=e", "track.mlflow.uri=file:runs"]
        for name in ("experiment", "uri")
    },
}
"""What else a conf must write for a key to act at all."""
VALUES: Mapping[str, str] = {
    "model": "gpt2-small",
    "track.plugins": "{mine: {address: here}}",
    "train.optimizer.betas": "[0.5, 0.5]",
    "train.optimizer.lr": "0.5",
    "train.micro_batch_size": "2",
    "train.global_batch_size": "16",
    "train.checkpoint.local": "/scratch",
    "parallel.pipeline": "2",
    "parallel.data": "8",
    "parallel.tensor": "2",
    "parallel.order": "pipeline",
    "parallel.partition": "4",
    "parallel.schedule": "gpipe",
    "cluster.scheduler": "local",
    "cluster.hetero": "split",
    "cluster.port": "20000",
    "progress": "'(?P<step>\\d+)'",
    "cluster.exclude": "[n7]",
    "cluster.nodes": "[{group: b}]",
    "cluster.nodes[].gpus": "4",
    "cluster.nodes[].devices": "[1]",
    "container.runtime": "pyxis",
    "container.image": "y.sqsh",
    "container.mounts": "[a:/b]",
    "container.workdir": "/x",
    "profile.ranks": "[1]",
    "prices": "{a100: 5}",
    "morph.grow": "auto",
    "notify.mail": "a@b",
    "notify.webhook": "https://b",
    "program": "{script: other.py}",
}
"""Where any text or number will not do."""
SAME: Mapping[str, str] = {
    "parallel.data": "it states what the layout comes to; another number is refused",
    "prices": "`vjob plan` reads it of the conf",
    "parallel.profile": "`vjob plan` reads it of the conf",
    "notify.mail": "`vjob watch` reads it of the resolved conf",
    "notify.webhook": "`vjob watch` reads it of the resolved conf",
    "notify.command": "`vjob watch` reads it of the resolved conf",
}
"""Keys that change nothing of plan, scripts and environment, with the reason."""


PROGRAMS: Mapping[str, tuple[str, Sequence[str]]] = {
    "pretrain_gpt": ("pretrain_gpt", ["model=gpt2-small", "data.synthetic=true"]),
    "pretrain_bert": ("pretrain_bert", ["model=bert-large", "data.synthetic=true"]),
    "megatron": ("{megatron: M}", ["model=gpt2-small", "data.synthetic=true"]),
    "deepspeed": ("{deepspeed: t.py}", []),
}
"""Programs that look at the training keys, and what their confs need."""
PROGRAMS_WITH: Mapping[str, Sequence[str]] = {
    "train.loss_scale": ["train.precision=fp16"],
    "train.schedule.min_lr": ["train.optimizer.lr=30"],
    **{f"train.checkpoint.{name}": ["train.checkpoint.folder=c"] for name in ("every", "keep")},
    "train.checkpoint.local": ["train.checkpoint.folder=c"],
    "data.split": ["data.synthetic=false", "data.prefix=x"],
    "data.vocab": ["data.synthetic=false", "data.prefix=x"],
    "data.prefix": ["data.synthetic=false"],
    "parallel.order": ["parallel.pipeline=2"],
    "parallel.partition": ["parallel.pipeline=2"],
    "parallel.sequence_parallel": ["parallel.tensor=2"],
    "parallel.context": ["cluster.nodes[0].count=2"],
}
PROGRAMS_VALUES: Mapping[str, str] = {
    "model": "gpt2-medium",
    "data.split": "'9,1,0'",
    "data.prefix": "y",
    "data.synthetic": "true",
    "train.loss_scale": "128",
    "train.schedule.min_lr": "0.001",
    "parallel.partition": "7-5",
    "parallel.recompute": "full",
}


def find_hint(key: str) -> Any:
    cls: Any = JobConf
    *sections, last = key.replace("[]", "").split(".")
    for name in sections:
        cls = get_section_class(get_hints(cls)[name])
    return get_hints(cls)[last]


def choose_value(key: str) -> str:
    """A value that is not the default, as `--set` takes it."""
    default = None if "[]" in key else find_default(key)
    if key in VALUES:
        return VALUES[key]
    for hint in get_members(find_hint(key)):
        origin = get_origin(hint)
        if origin is Literal:
            return next(str(word) for word in get_args(hint) if word not in (default, "auto"))
        if hint is bool:
            return "false" if default is True else "true"
        if hint in (int, float):
            return str((default if isinstance(default, int | float) else 20) + 1)
        if hint is str:
            return "other"
        if origin is tuple:
            return "[PATH]"
        if isinstance(origin, type):
            return "{constraint: ib}"
    raise AssertionError(f"VALUES must have {key}")


def read(text: str, overrides: Sequence[str]) -> tuple[JobConf, dict[str, str], list[Problem]]:
    conf, lines = parse_conf_lines(text, "c", BASE, overrides, environ={})
    return conf, lines, check_conf(conf, lines, base=BASE, require_paths=False)


def build(conf: JobConf, lines: Mapping[str, str]) -> tuple[Plan, object]:
    """All that a submit makes of a conf, of which pass_env has found its variables."""
    scheduler = choose_scheduler(conf, for_preview=True)
    plan = make_plan(
        conf,
        scheduler=scheduler,
        image_kind=ImageKind.SQUASHFS,
        written=lines,
        environ={"PATH": "/bin"},
    )
    return plan, render_scripts(conf, plan, RunFolder(Path(conf.log_folder, "r")))


def write(key: str) -> str:
    return f"{key.replace('[]', '[0]')}={choose_value(key)}"


@pytest.mark.parametrize("key", list_leaves())
@pytest.mark.parametrize("text", [SCRIPT, FUNCTION], ids=["script", "function"])
def test_no_key_is_ignored_in_silence(text: str, key: str) -> None:
    if key == "program":
        return
    others = WITH.get(key, [])
    plain = read(text, others)
    assert plain[2] == []
    conf, lines, problems = read(text, [*others, write(key)])
    assert conf != plain[0]
    if judge_fate(key) is Fate.REFERENCE:
        kind = conf.program.kind
        (said,) = (one for one in problems if f"has no effect with program.{kind}" in one.message)
        assert (said.key, said.where) == (key, "--set")
        assert "remove it, or pass it as ${" in said.message
    elif problems:
        assert any(key in str(one) for one in problems), problems
        assert key not in VARIABLES and key not in LAYOUT_VARIABLES
    else:
        changed = build(conf, lines) != build(*plain[:2])
        assert changed != (key in SAME)
        variable = VARIABLES.get(key)
        if variable is not None:
            plan, _ = build(conf, lines)
            value = find_value(conf, key)
            assert plan.env[variable] == (str(int(value)) if value in (True, False) else str(value))
            assert variable not in build(*plain[:2])[0].env


@pytest.mark.parametrize("key", [key for key in list_leaves() if judge_fate(key) is Fate.REFERENCE])
def test_a_key_that_the_script_refers_to_reaches_it(key: str) -> None:
    name = "model.layers" if key == "model" else key
    conf, lines, problems = read(
        SCRIPT, [f"program.args=['--it=${{{name}}}', '$${{x}}']", f"env.IT=${{{name}}}", write(key)]
    )
    assert not any("has no effect" in one.message or "${" in one.message for one in problems)
    plan, _ = build(conf, lines)
    value = spell_value(find_value(conf, name))
    assert plan.command[-2:] == (f"--it={value}", "${x}") and plan.env["IT"] == value


def test_a_script_gets_a_key_that_is_written_with_a_variable_or_referred_to() -> None:
    sizes = ("train.micro_batch_size", "train.global_batch_size")
    conf, _, _ = read(SCRIPT, [])
    assert reaches(conf, sizes, *sizes) and not reaches(conf, sizes[:1], *sizes)
    assert not reaches(conf, ("train.steps",), "train.steps")
    conf, _, _ = read(SCRIPT, ["train.steps=5", "program.args=['--it=${train.steps}']"])
    assert reaches(conf, (), "train.steps")


def test_a_default_reaches_no_script_and_what_is_written_does_even_if_it_is_the_default() -> None:
    for key, variable in VARIABLES.items():
        default = find_default(key)
        assert default is not MISSING
        if default is None:
            continue
        plain, lines, _ = read(SCRIPT, [])
        assert variable not in build(plain, lines)[0].env
        conf, lines, problems = read(SCRIPT, [f"{key}={spell_value(default)}"])
        if problems:  # offload
            continue
        assert conf == plain and variable in build(conf, lines)[0].env, key


@pytest.mark.parametrize(
    "key", [key for key in list_leaves() if key.startswith(OF_PROGRAMS) and key != "data.synthetic"]
)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_no_program_ignores_a_key_of_the_training_in_silence(kind: str, key: str) -> None:
    program, needed = PROGRAMS[kind]
    text = SCRIPT.replace("{script: train.py}", program)
    others = [*needed, *PROGRAMS_WITH.get(key, [])]
    value = PROGRAMS_VALUES.get(key) or choose_value(key)
    plain, (conf, lines, problems) = read(text, others), read(text, [*others, f"{key}={value}"])
    assert conf != plain[0]
    if goes_by_reference(kind, key):
        assert any(
            one.key == key and f"has no effect with program.{kind}" in one.message
            for one in problems
        )
    elif not any(key in str(one) for one in problems):
        folder, files = "/log/r", ProgramFiles()
        changed = build(conf, lines) != build(*plain[:2])
        changed |= build_files(conf, files, folder) != build_files(plain[0], files, folder)
        assert changed != (key in SAME)


def test_a_built_in_program_gets_none_of_the_variables() -> None:
    text = SCRIPT.replace("{script: train.py}", "pretrain_gpt") + "data: {synthetic: true}\n"
    conf, lines, problems = read(text, ["model=gpt2-small", "train={steps: 5, precision: bf16}"])
    assert problems == []
    assert not any(name.startswith("VJOB_") for name in build(conf, lines)[0].env)


@pytest.mark.parametrize("text", [SCRIPT, FUNCTION], ids=["script", "function"])
def test_the_resolved_conf_of_a_script_can_be_submitted_again(text: str) -> None:
    overrides = ["train={precision: fp32, seed: 7, steps: 9}", "env.STEPS=${train.steps}"]
    conf, lines, problems = read(text, overrides)
    assert problems == []
    resolved = render_resolved(conf, written=lines)
    again, lines_again, problems = read(resolved, [])
    assert (again, problems) == (conf, [])
    assert render_resolved(again, written=lines_again) == resolved
    assert json.loads(render_plan(build(again, lines_again)[0])) == json.loads(
        render_plan(build(conf, lines)[0])
    )


def test_a_reference_is_checked_where_it_stands() -> None:
    def say(text: str, *more: str) -> list[str]:
        return [str(one) for one in read(SCRIPT, [f"env.X={text}", *more])[2]]

    assert say("$${HOME} $HOME $(x)") == []
    for text, words in {
        "${train.step}": 'did you mean "train.steps"?',
        "${steps}": "did you mean ${train.steps} or ${train.evaluate.steps}?",
        "${micro_batch}": 'did you mean "train.micro_batch_size"?',
        "${zzz}": "docs/conf.md lists them",
        "${FOO}": "write pass_env: [FOO] and read it in the program's environment",
        "${FOO:-3}": "write pass_env: [FOO]",
        "${train": "is not closed by }",
        "${}": "is not a conf key",
        "${train.optimizer}": "is a section: name a key in it, such as ${train.optimizer.name}",
        "${cluster.nodes}": "is a list of groups: name one, ${cluster.nodes[0].count}",
        "${cluster.nodes[3].count}": "is not a conf key",
        "${train.checkpoint.local}": "has no value: set train.checkpoint.local",
        "${env.X}": "has references in it",
    }.items():
        (said,) = say(text)
        assert said.startswith("--set: env.X = ") and words in said, said
        assert "$${" in said or "name " in said or "set " in said or "references" in said
    conf = ["program.args=['--k', '${env.MY_TOKEN}']", "env.MY_TOKEN=x"]
    (problem,) = read(SCRIPT, conf)[2]
    assert "is a secret, but process lists show arguments" in problem.message


def test_a_reference_to_a_default_that_follows_from_others_is_what_it_comes_to() -> None:
    names = ["parallel.data", "train.global_batch_size", "train.schedule.decay_steps"]
    args = [*names, "cluster.nodes[0].count", "cluster.requeue"]
    spelled = ", ".join(f"'${{{name}}}'" for name in args)
    conf, lines, problems = read(
        SCRIPT,
        [f"program.args=[{spelled}]", "parallel.pipeline=2", "train.micro_batch_size=3"],
    )
    assert problems == []
    assert build(conf, lines)[0].command[-5:] == ("4", "24", "50", "2", "false")


def test_a_switch_that_is_written_lets_what_it_switches_stay() -> None:
    for key, switch in (
        ("morph.min_nodes=1", "morph.enabled=false"),
        ("container.workdir=/x", "container.image=null"),
        ("profile.options=[--x]", "profile.nsys=false"),
    ):
        (said,) = read(SCRIPT, [key])[2]
        assert "has no effect without " in said.message
        assert read(SCRIPT, [key, switch])[2] == []


def test_the_page_of_all_keys_tells_the_fate_of_each() -> None:
    page = render_conf_doc()
    assert "| `VJOB_PRECISION` | Arithmetic" in page and "| refer | Optimizer steps. |" in page
    assert {render_fate(key) for key in list_leaves()} == {
        "acts",
        "refer",
        *(f"`{name}`" for name in (*VARIABLES.values(), *LAYOUT_VARIABLES.values())),
    }
    assert (render_fate("train"), render_fate("data"), render_fate("cluster")) == (
        "",
        "refer",
        "acts",
    )
    assert get_section_class(get_hints(JobConf)["cluster"]) is not NodeGroup


def test_sweeps_and_python_meet_the_same_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    path = tmp_path / "conf.yaml"
    path.write_text(SCRIPT)
    rows = [{"train.optimizer.lr": "0.1"}, {"train.optimizer.lr": "0.2"}]
    with pytest.raises(InputError, match=r"lr = 0\.1: has no effect with"):
        prepare_sweep(path, rows, for_preview=True)
    refer = ["program.args=['--lr', '${train.optimizer.lr}']"]
    sweep = prepare_sweep(path, rows, overrides=refer, for_preview=True)
    assert [run.ready.plan.command[-1] for run in sweep.runs] == ["0.1", "0.2"]
    with pytest.raises(vjob.ConfError, match=r"train\.steps = 5: has no effect"):
        vjob.load("conf.yaml", set={"train.steps": 5})
    conf = vjob.load("conf.yaml", set={"train": {"seed": 5, "precision": "bf16"}})
    again = resolve(read_source(conf))
    cluster = replace(conf.cluster, walltime_min=60)  # a job in a queue has a limit
    assert again.conf == replace(conf, cluster=cluster)
    plan = prepare(again, for_preview=True).plan
    assert (plan.env["VJOB_SEED"], plan.env["VJOB_PRECISION"]) == ("5", "bf16")
    assert len([name for name in plan.env if name.startswith("VJOB_")]) == 2

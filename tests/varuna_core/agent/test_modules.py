"""Modules that a plan asks for, looked for by the ranks' own Python before any rank starts."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import Stage, make_container, make_group, make_plan
from tests.varuna_core.agent.test_preflight import make_site
from varuna_core.agent.checks.modules import build_question, check_modules
from varuna_core.agent.setup.ranks import RankStart
from varuna_core.records.exits import NOT_READY
from varuna_core.records.nodes import WARN, read_report
from varuna_core.records.plan import Plan

MakeStage = Callable[..., Stage]
REMEDY = "set train.optimizer.apex to auto or false"
WANTED = (("amp_C", REMEDY), ("json", "never told"))
ENTER = """
import os, sys
env = {name: os.environ[name] for name in ("VJOB_ENTER", "PATH")}
os.execve(sys.argv[1], sys.argv[1:], env)
"""
"""A container runtime in miniature: only the one variable enters."""


def build(folder: Path, **changes: object) -> Plan:
    """Two ranks, whose Python finds a module amp_C in the folder by the run's environment."""
    (folder / "amp_C.py").write_text("raise ImportError('needs a GPU')")
    program = (sys.executable, "-c", "print('trained')")
    plan = make_plan(make_group("a", 1, 2), command=program, modules=WANTED)
    return replace(plan, **{"env": {"PYTHONPATH": str(folder)}, **changes})


def find_check(stage: Stage) -> tuple[str, str]:
    report = read_report(stage.attempt, 0)
    assert report is not None
    return next((check.status, check.text) for check in report.checks if check.name == "modules")


def test_a_missing_module_ends_the_attempt_before_its_ranks_with_the_remedy(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    stage = make_stage(build(tmp_path, env={}))
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([NOT_READY], NOT_READY)
    assert f"the ranks' Python lacks amp_C: {REMEDY}" in outcome.reason
    assert "never told" not in outcome.reason and "trained" not in stage.log("n0", "out")


def test_modules_are_found_in_the_environment_of_the_ranks(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    stage = make_stage(build(tmp_path))
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0)
    assert find_check(stage) == ("ok", "amp_C, json there")
    assert "trained" in stage.log("n0", "out")


@pytest.mark.parametrize("is_there", [True, False])
def test_in_a_container_its_python_is_asked(
    make_stage: MakeStage, tmp_path: Path, is_there: bool
) -> None:
    container = make_container(sys.executable, "-c", ENTER)
    env = {"PYTHONPATH": str(tmp_path)} if is_there else {}
    stage = make_stage(build(tmp_path, env=env, containers=(container,)))
    codes, _ = stage.play()
    assert codes == [0 if is_there else NOT_READY]
    assert find_check(stage)[0] == ("ok" if is_there else "fail")


def test_a_python_that_cannot_be_asked_is_a_warning(make_stage: MakeStage, tmp_path: Path) -> None:
    """The program may be a wrapper that takes no -c; else the ranks say what is wrong."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text("#!/bin/sh\n[ \"$1\" != -c ] || { echo 'no such option' >&2; exit 3; }\n")
    wrapper.chmod(0o755)
    stage = make_stage(build(tmp_path, command=(str(wrapper), "train")))
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0)
    status, text = find_check(stage)
    assert status == "warn" and "exited 3 no such option" in text


def test_a_python_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    site = make_site(tmp_path, build(tmp_path))
    (found,) = check_modules(site, RankStart(("sleep", "1000"), {}, "/", ()), timeout_s=0.1)
    assert found.status == WARN and "no answer in 0.1 s" in found.text


def test_the_profiler_before_a_rank_is_not_asked(tmp_path: Path) -> None:
    question = build_question(build(tmp_path, prefix=("nsys", "profile")))
    assert question.command_of(0)[0] == sys.executable

"""`vjob plan --recalibrate`: from a run folder's trace to a profile that plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.jobs.planning.test_plan_command import CONF, NAME, plan, put_profile
from tests.varuna_core.planner.predicted_trace import write_trace
from tests.varuna_core.planner.scaled import scale_times
from varuna_core.planner.model.step import simulate_step
from varuna_core.planner.model.tables import Tables
from varuna_core.planner.profile.profile_file import read_profile, write_profile
from varuna_core.planner.result.plan import build_chain
from varuna_core.records.runfolder import RunFolder, make_run_folder
from vjob.jobs.planning.fixed_layout import plan_fixed_layout
from vjob.jobs.planning.inputs import read_open_conf
from vjob.jobs.planning.question import PlanOptions, load_question
from vjob.jobs.planning.resolve_auto import KEYS, resolve_conf
from vjob.jobs.submit.submit import prepare, write_run_folder
from vjob.shelf.commands.cli import cli

SETTINGS = (
    "parallel.pipeline=8",
    "parallel.partition=1-1-1-1-1-1-1-1",
    "parallel.schedule=1f1b",
    "parallel.recompute=none",
)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    return path


def make_run(conf: Path, factor: float, *settings: str) -> RunFolder:
    """A run whose A10s take so many times what the profile says."""
    overrides = [*SETTINGS, *settings]
    run = make_run_folder(conf.parent / "run")
    write_run_folder(prepare(resolve_conf(conf, overrides), for_preview=True), run)
    read = read_open_conf(conf, overrides).conf
    question = load_question(read, KEYS, conf.parent, PlanOptions(prices={}))
    true = scale_times(question.profile, {"A10"}, lambda _: True, factor)
    found = plan_fixed_layout(question, read)
    assert found is not None
    chain = build_chain(Tables(true, question.training), found.candidate)
    costs = chain.build_costs(found.candidate.bounds)
    step = simulate_step(chain.compiled, costs, keep_starts=True)
    attempt = run.attempt(0)
    attempt.make()
    write_trace(attempt.trace(0).parent, chain.compiled, costs, step)
    return run


def test_the_profile_is_fitted_and_kept_apart(conf: Path) -> None:
    old = put_profile(conf.parent)
    before = old.read_text()
    run = make_run(conf, 1.25)
    target = conf.parent / "new.json"
    call = ["plan", "--recalibrate", str(run.path), "--profile", str(old), "-o", str(target)]
    done = CliRunner().invoke(cli, call)
    assert done.exit_code == 0, done.output
    new = read_profile(target)
    assert old.read_text() == before
    cells = [profile.find_cell("A10", 1) for profile in (new, read_profile(old))]
    factor = cells[0].forward_s[5] / cells[1].forward_s[5]
    assert factor == pytest.approx(1.25, rel=0.01)
    assert "1.25" in done.output and "A10, forward" in done.output
    assert "recalibrated" in new.software


def test_an_estimate_becomes_of_use(conf: Path) -> None:
    """Without any profile: a run is enough to plan by."""
    run = make_run(conf, 2.0)
    done = CliRunner().invoke(cli, ["plan", "--recalibrate", str(run.path)])
    assert done.exit_code == 0, done.output
    target = run.path / "profiles" / f"{NAME}.recalibrated.json"
    assert f"recalibrated {run.name}" in plan(conf, "--profile", str(target))


def test_what_a_run_does_not_tell(conf: Path) -> None:
    run = make_run(conf, 1.0)
    for trace in run.attempt(0).trace(0).parent.iterdir():
        trace.unlink()
    call = ["plan", "--recalibrate", str(run.path)]
    assert "no trace" in CliRunner().invoke(cli, call).output
    training = json.loads(run.training.read_text())
    run.training.write_text(json.dumps({**training, "partition": None}))
    assert "balanced its stages by itself" in CliRunner().invoke(cli, call).output
    run.training.unlink()
    assert "program of your own" in CliRunner().invoke(cli, call).output
    other = put_profile(conf.parent)
    run.training.write_text(json.dumps(training))
    found = read_profile(other)
    write_profile(other, replace(found, model=replace(found.model, digest="else")))
    done = CliRunner().invoke(cli, [*call, "--profile", str(other)])
    assert done.exit_code == 2 and "else" in done.output
    assert CliRunner().invoke(cli, ["plan"]).exit_code == 2

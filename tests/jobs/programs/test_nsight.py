"""Profilers stand before the ranks that were asked for, and their output beside the ranks' own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command import PROGRAMS, Vjob, read_out
from tests.jobs.confs import SINGLE, make_conf, make_plan
from varuna_core.records.plan import parse_plan, render_plan
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.programs.start import build_profiler_prefix

CONF = """
name: who
program: {{script: {script}}}
cluster:
  scheduler: local
  walltime_min: 2
  nodes: [{{group: m, count: 1, ranks: 3}}]
profile: {{nsys: true, ranks: [2], options: ["--stats=true", "%{{rank}}"]}}
env: {{PATH: {path}}}
"""
STANDIN = """#!/bin/sh
for word in "$@"; do
  case "$word" in --output=*) echo "$@" > "${word#--output=}.nsys-rep" ;; esac
done
while case "$1" in profile|-*|%*) true ;; *) false ;; esac; do shift; done
exec "$@"
"""


def test_only_the_ranks_that_were_asked_for_have_the_profiler_before_them() -> None:
    plan = make_plan(make_conf(f"{SINGLE}profile: {{nsys: true, ranks: [1, 7]}}\n"))
    assert plan.command_of(0) == plan.command == plan.command_of(6)
    assert plan.command_of(7)[:2] == ("nsys", "profile")
    assert plan.command_of(7)[-len(plan.command) :] == plan.command
    assert "--output=%{folder}/attempt-%{attempt}/ranks/%{rank}" in plan.command_of(1)
    assert parse_plan(json.loads(render_plan(plan))) == plan


def test_a_program_that_marks_its_steps_is_profiled_there_alone() -> None:
    conf = make_conf(f"{SINGLE}profile: {{ncu: true}}\n")
    assert "--profile-from-start=off" in build_profiler_prefix(conf, marks_steps=True)
    assert "--profile-from-start=off" not in build_profiler_prefix(conf, marks_steps=False)
    conf = make_conf(f"{SINGLE}profile: {{nsys: true}}\n")
    assert "--capture-range=cudaProfilerApi" in build_profiler_prefix(conf, marks_steps=True)
    assert check_conf(conf, {}, require_paths=False) == []


def test_a_built_in_program_may_be_profiled_too() -> None:
    conf = make_conf(
        "name: x\nprogram: pretrain_gpt\nmodel: gpt2-small\ndata: {synthetic: true}\n"
        "profile: {nsys: true, ranks: [0]}\n"
    )
    assert check_conf(conf, {}, require_paths=False) == []
    words = make_plan(conf, run="r").command_of(0)
    assert words[:2] == ("nsys", "profile") and words[-1] == "/log/r/training.json"


def test_a_profiled_rank_runs_and_leaves_its_file_with_the_run(tmp_path: Path) -> None:
    """A stand-in for nsys, which is NVIDIA's: it writes where it is told, and runs the rank."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nsys").write_text(STANDIN)
    (tools / "nsys").chmod(0o755)
    vjob = Vjob(tmp_path)
    path = f"{tools}:{vjob.env['PATH']}"
    run = vjob.submit(CONF.format(script=PROGRAMS / "report_rank.py", path=path))
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    found = [path.name for path in run.path.rglob("*.nsys-rep")]
    assert found == ["2.nsys-rep"]
    (written,) = run.path.glob("attempt-0/ranks/2.nsys-rep")
    assert "--stats=true %{rank}" in written.read_text()
    rows = map(json.loads, read_out(run).splitlines())
    assert sorted(row["rank"] for row in rows) == [0, 1, 2]


def test_a_missing_profiler_is_said_before_the_start(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    run = vjob.submit(
        CONF.format(script=PROGRAMS / "report_rank.py", path="/bin:/usr/bin").replace(
            "nsys: true", "ncu: true"
        )
    )
    record = vjob.wait_over(run)
    assert record["verdict"] == "FAILED"
    logs = "".join(path.read_text() for path in run.path.glob("scheduler*.out"))
    assert "ncu does not exist or is not executable" in logs

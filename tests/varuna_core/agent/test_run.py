"""Whole attempts with real agents: how they end, and whom the outcome names."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import read_rank
from tests.pythons import OLDEST, list_pythons
from tests.varuna_core.agent.local_run import (
    TIMING,
    Stage,
    is_running,
    make_container,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from varuna_core.records.exits import NODE_LOST, NOT_READY
from varuna_core.records.files import read_json
from varuna_core.records.nodes import read_report
from varuna_core.records.record import read_events

MakeStage = Callable[..., Stage]

ENTER = """
import os, sys
env = {name: os.environ[name] for name in ("VJOB_ENTER", "PATH")}
os.execve(sys.argv[1], sys.argv[1:], env)
"""
"""A container runtime in miniature: only the one variable enters."""


@pytest.mark.parametrize("version", [sys.version_info[:2], OLDEST])
def test_all_ranks_that_exit_0_end_the_attempt_with_0(
    make_stage: MakeStage, version: tuple[int, int]
) -> None:
    python = list_pythons().get(version)
    if python is None:
        pytest.skip("no Python 3.8 on this machine")
    plan = make_plan(make_group("a", 2, 2), command=shell('echo "rank $RANK of $WORLD_SIZE"'))
    stage = make_stage(plan, python=python)
    codes, outcome = stage.play()
    assert codes == [0, 0]
    assert (outcome.code, outcome.reason) == (0, "all 4 ranks exited 0")
    assert sorted(stage.log("n0", "out").splitlines()) == ["0: rank 0 of 4", "1: rank 1 of 4"]
    assert sorted(stage.log("n1", "out").splitlines()) == ["2: rank 2 of 4", "3: rank 3 of 4"]
    assert read_rank(stage.run, 3) == "rank 3 of 4\n"
    kinds = [event["kind"] for event in read_events(stage.run)]
    assert kinds == ["started", "preflight", "ended"]
    assert list(stage.attempt.exit(0).parent.glob(".*")) == [], "reserves are gone"


TRACES = """
import os, time
from varuna_core.records.logs.trace import TraceWriter, choose_trace_file
trace = TraceWriter(choose_trace_file(os.environ), int(os.environ["RANK"]))
trace.begin_step(1)
trace.close()
print("out")
"""


def count_files(stage: Stage) -> int:
    """Files of the attempt but for those that it has once, whatever its nodes are."""
    once = (stage.attempt.master.parent, stage.attempt.preflight)
    found = [path for path in stage.attempt.path.rglob("*") if path.is_file()]
    return sum(path not in once and path.parent not in once for path in found)


def test_a_node_leaves_eight_files_however_many_ranks_it_has(make_stage: MakeStage) -> None:
    """It left 7 and four for each rank."""
    gate = "while not os.path.exists(os.environ['GATE']): time.sleep(0.02)"
    plan = make_plan(make_group("a", 2, 8), command=(sys.executable, "-c", TRACES + gate))
    stage = make_stage(plan)
    go = stage.run.path / "go"
    stage = make_stage(
        replace(plan, env={"GATE": str(go), "PYTHONPATH": str(ROOT)}), stage.run.path
    )
    stage.open()
    stage.start_all()
    wait_until(lambda: stage.log("n0", "out").count("out") == 8, "all ranks of n0")
    wait_until(lambda: stage.log("n1", "out").count("out") == 8, "all ranks of n1")
    assert count_files(stage) <= 2 * 8
    go.touch()
    assert stage.wait() == [0, 0]
    assert count_files(stage) <= 2 * 8
    assert len(stage.exits()) == 16
    assert sorted(path.name for path in stage.attempt.list_traces()) == [
        "node-0.jsonl",
        "node-1.jsonl",
    ]


def test_exit_9_stays_9_and_names_the_culprit(make_stage: MakeStage) -> None:
    program = 'if [ "$RANK" = 2 ]; then echo boom >&2; exit 9; fi; sleep 60'
    stage = make_stage(make_plan(make_group("a", 2, 2), command=shell(program)))
    codes, outcome = stage.play()
    assert codes == [143, 9]
    assert (outcome.code, outcome.culprit_rank, outcome.culprit_node) == (9, 2, "n1")
    assert outcome.reason == "rank 2 on n1 exited 9: boom"
    stop = read_json(stage.attempt.stop)
    assert (stop["kind"], stop["rank"], stop["code"]) == ("rank", 2, 9)
    assert [stage.exits()[rank].stopped for rank in range(4)] == [True, True, False, True]


def test_a_killed_rank_is_137_with_its_signal_named(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(make_group("a", 1, 2), command=shell("echo $$; exec sleep 60")))
    stage.open()
    stage.start_all()
    wait_until(lambda: len(stage.log("n0", "out").splitlines()) == 2, "two pids")
    pids = dict(line.split(": ") for line in stage.log("n0", "out").splitlines())
    os.kill(int(pids["1"]), signal.SIGKILL)
    assert stage.wait() == [137]
    outcome = stage.close(143)
    assert (outcome.code, outcome.culprit_rank) == (137, 1)
    assert outcome.culprit_signal == "SIGKILL"


def test_ranks_die_with_a_killed_agent_and_close_names_its_node(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(make_group("a", 2, 1), command=shell("echo $$; exec sleep 60")))
    stage.open()
    stage.start_all()
    pid = int(stage.wait_for_log("n1", "out", "\n").split(": ")[1])
    stage.wait_for_log("n0", "out", "\n")
    stage.nodes[1].kill()
    wait_until(lambda: not is_running(pid), "the end of the orphaned rank")
    stage.nodes[0].terminate()  # as srun does when a task is gone
    assert stage.wait() == [143, -signal.SIGKILL]
    outcome = stage.close(137)
    assert (outcome.code, outcome.culprit_node) == (NODE_LOST, "n1")
    assert "the agent on n1 exited" in outcome.reason


def test_a_program_that_is_missing_is_found_by_preflight(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(command=("/no/such/program",)))
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([NOT_READY], NOT_READY)
    assert "/no/such/program" in outcome.reason


def test_a_program_that_cannot_start_fails_as_in_a_shell(make_stage: MakeStage) -> None:
    """In a container nobody can look for it before; here the container is a missing runtime."""
    container = make_container("/no/runtime")
    plan = make_plan(make_group("a", 1, 2), command=("x",), containers=(container,))
    codes, outcome = make_stage(plan).play()
    assert (codes, outcome.code, outcome.culprit_rank) == ([127], 127, 0)
    assert "/no/runtime" in outcome.reason


def test_srun_that_never_started_an_agent_is_not_a_success(make_stage: MakeStage) -> None:
    """srun --output=missing/... returned 0 on 22.05 without starting anything."""
    stage = make_stage(make_plan())
    stage.open()
    assert stage.close(0).code == NOT_READY
    assert "before any agent reported" in stage.close(0).reason


def test_an_older_try_of_an_attempt_is_set_aside(make_stage: MakeStage, tmp_path: Path) -> None:
    """A batch script that is run again has the same attempt number, and an old stop.json."""
    mark = tmp_path / "second"
    stage = make_stage(make_plan(command=shell(f"[ -e {mark} ] || exit 9")))
    assert stage.play()[1].code == 9
    mark.touch()
    stage.end()
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0)
    assert (stage.attempt.path / "earlier-0" / "state" / "stop.json").exists()


def test_a_node_waits_for_a_master_that_comes_later(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan())
    agent = stage.start(0)
    stage.attempt.make()
    stale = {"address": "127.0.0.1", "port": 1, "host": "n0", "attempt": 7, "time": 1.0}
    stage.attempt.master.write_text(json.dumps(stale))
    stage.open()
    assert agent.wait(timeout=20) == 0


def test_a_node_gives_up_without_a_master(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(timing=replace(TIMING, join_s=0.3)))
    agent = stage.start(0)
    assert agent.wait(timeout=20) == NOT_READY
    assert "did the job of group only not start" in agent.communicate()[1]


def test_a_container_is_prepared_entered_and_cleaned(make_stage: MakeStage) -> None:
    container = replace(
        make_container(sys.executable, "-c", ENTER),
        prepare=(("sh", "-c", 'echo "unpacking into $STORE" >&2'),),
        env={"STORE": "/store"},
        clean=(("sh", "-c", "echo gone >&2"),),
    )
    program = ("sh", "-c", 'echo "$RANK ${STORE-out} ${PYTHONPATH-out} $GREETING"')
    plan = make_plan(command=program, containers=(container,), env={"GREETING": "two words"})
    stage = make_stage(plan)
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0)
    assert stage.log("n0", "out") == "0: 0 out out two words\n"
    assert stage.log("n0", "err") == "vjob sh: unpacking into /store\nvjob sh: gone\n"
    report = read_report(stage.attempt, 0)
    assert report is not None
    assert {"GREETING", "RANK", "MASTER_ADDR"} <= set(report.environment)
    assert "two words" not in stage.attempt.node_report(0).read_text()


def test_a_container_that_cannot_be_prepared_is_not_ready(make_stage: MakeStage) -> None:
    container = replace(make_container(), prepare=(("sh", "-c", "echo no image >&2; exit 3"),))
    stage = make_stage(make_plan(make_group("a", 2, 1), containers=(container,)))
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([NOT_READY, NOT_READY], NOT_READY)
    assert "exited 3: no image" in outcome.reason


def test_a_missing_path_on_one_node_ends_all_with_a_table(make_stage: MakeStage) -> None:
    """Node 1 alone lacks its TMPDIR; no rank of any node starts."""
    stage = make_stage(make_plan(make_group("a", 2, 1), command=shell("echo ran")))
    stage.open()
    stage.start(0)
    stage.start(1, TMPDIR="/no/such/folder")
    assert stage.wait() == [NOT_READY, NOT_READY]
    table = stage.attempt.preflight.read_text()
    assert table in stage.nodes[0].communicate()[0]
    assert "1     n1    a" in table and "FAIL" in table
    assert "fail disk: TMPDIR /no/such/folder: No such file" in table
    outcome = stage.close(NOT_READY)
    assert (outcome.code, outcome.culprit_node) == (NOT_READY, "n1")
    assert read_json(stage.attempt.beat(1))["state"] == "done"
    assert "n1: disk: TMPDIR /no/such/folder" in outcome.reason
    assert stage.log("n0", "out") == "" and stage.exits() == {}


def test_paths_of_the_plan_must_exist(make_stage: MakeStage) -> None:
    _, outcome = make_stage(make_plan(must_exist=("/data/not/here",))).play()
    assert "/data/not/here: No such file" in outcome.reason


def test_a_port_that_was_taken_meanwhile_is_replaced_for_every_rank(make_stage: MakeStage) -> None:
    """Between `open` and go a container may be prepared for half an hour."""
    stage = make_stage(make_plan(make_group("a", 2, 1), command=shell("echo $MASTER_PORT")))
    stage.open()
    taken = json.loads(stage.attempt.master.read_text())["port"]
    with socket.create_server(("", taken)):
        stage.start_all()
        assert stage.wait() == [0, 0]
    ports = {stage.log(host, "out").split(": ")[1].strip() for host in ("n0", "n1")}
    assert len(ports) == 1 and ports != {str(taken)}

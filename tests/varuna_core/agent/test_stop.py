"""Signals and stops: who gets them, and what the ranks are granted before they are killed."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import (
    TIMING,
    Stage,
    is_running,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from varuna_core.agent.cli import main
from varuna_core.records.files import read_json
from varuna_core.records.requests import write_stop

MakeStage = Callable[..., Stage]

OBEDIENT = """
import os, signal, sys, time
caught = []
for name in ("SIGUSR1", "SIGUSR2", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, frame: caught.append(number))
print("ready", flush=True)
while True:
    time.sleep(0.01)
    while caught:
        number = caught.pop(0)
        print("caught", signal.Signals(number).name, flush=True)
        if number == signal.SIGTERM:
            sys.exit(int(os.environ.get("CODE", "0")))
"""
STUBBORN = 'trap "" TERM; echo $$; while :; do sleep 0.05; done'


def play_obedient(make_stage: MakeStage, nodes: int, ranks: int) -> Stage:
    command = (sys.executable, "-c", OBEDIENT)
    stage = make_stage(make_plan(make_group("a", nodes, ranks), command=command))
    stage.open()
    stage.start_all()
    for index, node in enumerate(range(nodes)):
        for rank in range(index * ranks, (index + 1) * ranks):
            stage.wait_for_log(f"n{node}", "out", f"{rank}: ready")
    return stage


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_user_signals_reach_every_rank(make_stage: MakeStage, name: str) -> None:
    stage = play_obedient(make_stage, 1, 3)
    stage.nodes[0].send_signal(signal.Signals[name])
    for rank in range(3):
        stage.wait_for_log("n0", "out", f"{rank}: caught {name}")
    assert stage.nodes[0].poll() is None
    stage.nodes[0].terminate()
    stage.wait()


def test_a_signal_waits_for_the_rank_that_has_no_handler_yet(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """One that still imports its modules would die of the call to save."""
    gate = tmp_path / "loaded"
    loading = "import os, time\nprint('loading', flush=True)\n"
    loading += (
        f"while os.environ['RANK'] == '1' and not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    )
    plan = make_plan(make_group("a", 1, 2), command=(sys.executable, "-c", loading + OBEDIENT))
    stage = make_stage(plan)
    stage.open()
    stage.start_all()
    stage.wait_for_log("n0", "out", "0: ready")
    stage.wait_for_log("n0", "out", "1: loading")
    stage.nodes[0].send_signal(signal.SIGUSR1)
    stage.wait_for_log("n0", "out", "0: caught SIGUSR1")
    assert stage.nodes[0].poll() is None and "1: caught" not in stage.log("n0", "out")
    gate.touch()
    stage.wait_for_log("n0", "out", "1: caught SIGUSR1")
    stage.nodes[0].terminate()
    stage.wait()
    assert stage.log("n0", "out").count("caught SIGUSR1") == 2


def count_calls(stage: Stage) -> list[int]:
    return [stage.log(f"n{node}", "out").count("caught SIGUSR1") for node in range(2)]


def test_a_call_by_file_reaches_each_rank_once_and_no_child(make_stage: MakeStage) -> None:
    program = OBEDIENT.replace('print("ready"', 'print("ready", child.pid')
    program = f"import subprocess; child = subprocess.Popen(['sleep', '60'])\n{program}"
    stage = make_stage(make_plan(make_group("a", 2, 1), command=(sys.executable, "-c", program)))
    stage.open()
    stage.start_all()
    logs = [stage.wait_for_log(f"n{node}", "out", f"{node}: ready") for node in range(2)]
    children = [int(log.split("ready")[1].split()[0]) for log in logs]
    for count, key in enumerate(["one", "two"], 1):
        stage.call("signal", "--key", key)
        wait_until(lambda count=count: count_calls(stage) == [count, count], "the call")
        stage.call("signal", "--key", key)
    stage.call("signal", "--name", "USR2", "--key", "three")
    for node in range(2):
        stage.wait_for_log(f"n{node}", "out", "caught SIGUSR2")
    assert count_calls(stage) == [2, 2], "once a key"
    assert all(is_running(child) for child in children)
    stage.nodes[0].terminate()
    stage.wait()


def test_term_ends_the_ranks_in_their_own_time(make_stage: MakeStage) -> None:
    stage = play_obedient(make_stage, 2, 1)
    stage.nodes[1].terminate()
    assert stage.wait() == [143, 143], "the other node learns it from stop.json"
    assert all(item.stopped and item.code == 0 for item in stage.exits().values())
    outcome = stage.close(143)
    assert outcome.code == 143
    assert outcome.reason.startswith("SIGTERM from outside, seen first on")


def test_stubborn_ranks_are_killed_after_the_grace(make_stage: MakeStage) -> None:
    timing = replace(TIMING, grace_s=0.5)
    stage = make_stage(make_plan(make_group("a", 1, 2), command=shell(STUBBORN), timing=timing))
    stage.open()
    stage.start_all()
    for rank in range(2):
        log = stage.wait_for_log("n0", "out", f"{rank}: ")
    pids = [int(line.split()[1]) for line in log.splitlines()]
    stage.nodes[0].terminate()
    stage.nodes[0].terminate()
    assert stage.wait() == [143]
    assert not any(map(is_running, pids))
    assert {item.signal for item in stage.exits().values()} == {"SIGKILL"}
    assert stage.close(143).code == 143


def test_a_rank_that_the_scheduler_signals_first_is_no_culprit(make_stage: MakeStage) -> None:
    """proctrack/linuxproc: Slurm signals every process of a step, ranks before the agent even."""
    stage = make_stage(make_plan(make_group("a", 1, 2), command=shell("echo $$; exec sleep 60")))
    stage.open()
    stage.start_all()
    for rank in range(2):
        log = stage.wait_for_log("n0", "out", f"{rank}: ")
    for line in log.splitlines():
        os.kill(int(line.split()[1]), signal.SIGTERM)
    stage.nodes[0].terminate()
    assert stage.wait() == [143]
    outcome = stage.close(143)
    assert (outcome.code, outcome.culprit_rank) == (143, None)
    assert all(item.stopped for item in stage.exits().values())


def test_stop_ends_all_nodes_with_its_reason(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(make_group("a", 2, 1), command=shell("echo on; exec sleep 60")))
    stage.open()
    stage.start_all()
    for node in ("n0", "n1"):
        stage.wait_for_log(node, "out", "on")
    assert stage.call("stop", "--reason", "cancelled by ann").returncode == 0
    assert stage.wait() == [143, 143]
    second = stage.call("stop", "--reason", "too late", "--kind", "lost", "--code", "7")
    assert "asked to stop before" in second.stderr
    outcome = stage.close(143)
    assert (outcome.code, outcome.reason) == (143, "cancelled by ann")


def test_a_stop_ends_nodes_that_still_wait_for_the_others(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(make_group("a", 2, 1)))
    stage.open()
    agent = stage.start(0)
    stage.call("stop", "--reason", "cancelled by ann")
    assert agent.wait(timeout=20) == 143
    assert stage.close(143).reason == "cancelled by ann"


def test_leftovers_of_a_rank_end_with_it(make_stage: MakeStage) -> None:
    """A data worker that outlives its rank would hold the GPU's memory."""
    stage = make_stage(make_plan(command=shell("sleep 60 & echo $!; exit 3")))
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([3], 3)
    assert not is_running(int(stage.log("n0", "out").split()[1]))


@pytest.mark.parametrize("trap", ["", "trap '' TERM;"], ids=["obedient", "stubborn"])
def test_what_ran_off_into_a_session_of_its_own_ends_too(make_stage: MakeStage, trap: str) -> None:
    """A grandchild whose parent has ended, with a child of its own."""
    run_off = f"setsid sh -c '{trap} sleep 60 & echo $$ $!; wait' &"
    stage = make_stage(make_plan(command=shell(f"{run_off} sleep 0.5")))
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0), "and it is no failure"
    pids = [int(word) for word in stage.log("n0", "out").replace("0: ", "").split()]
    assert len(pids) == 2 and not any(is_running(pid) for pid in pids)
    assert f"{pids[0]} (sh)" in stage.nodes[0].communicate()[1]


def test_ranks_end_when_somebody_removes_the_run_folder(make_stage: MakeStage) -> None:
    stage = play_obedient(make_stage, 2, 1)
    shutil.rmtree(stage.run.path)
    assert stage.wait() == [143, 143]
    assert "the run folder was removed" in stage.nodes[1].communicate()[1]


def test_the_first_stop_wins(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan())
    stage.open()
    assert write_stop(stage.attempt, "cancel", 143, "first")
    assert not write_stop(stage.attempt, "lost", 113, "second")
    assert read_json(stage.attempt.stop)["reason"] == "first"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2", "with exit status 3: module load cuda"),
        ("3", "with exit status 3: " + "x" * 157 + "..."),
        ("", "with exit status 3; it is not known which"),
        ("99", "with exit status 3; it is not known which"),
    ],
)
def test_a_run_that_may_morph_names_the_setup_line_on_standard_error(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "node.sh"
    script.write_text(f"#!/bin/bash\n  module load cuda\n{'x' * 500}\n")
    where = ["--run", str(tmp_path), "--node", "n7", "--script", str(script)]
    assert main(["setup-failed", *where, "--line", line, "--status", "3"]) == 0
    told = capsys.readouterr().err
    assert told == f"vjob: a setup line failed on n7 {said}; the run goes without this node\n"

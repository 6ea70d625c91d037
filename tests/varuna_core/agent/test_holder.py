"""The node's one container, played by shells: a holder that stays, and ranks that enter it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.varuna_core.agent.local_run import (
    Stage,
    is_running,
    make_container,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from varuna_core.agent.setup.known_lines import write_known_lines
from varuna_core.facts.catalogue.known_line import KnownLine, Scope
from varuna_core.facts.catalogue.remedies import do
from varuna_core.records.nodes import read_report

MakeStage = Callable[..., Stage]

STAYS = 'echo "$$" >>{log}; echo "a hook speaks"; echo vjob-holds; while read -r line; do :; done'


def make_held(
    make_stage: MakeStage, hold: str, *command: str, ranks: int = 2, **changes: Any
) -> Stage:
    container = replace(
        make_container("env", "HOLDER=%{holder}"), hold=shell(hold), hold_again="locked"
    )
    plan = make_plan(make_group("a", 1, ranks), command=command, containers=(container,), **changes)
    return make_stage(plan)


def read_holders(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def test_one_is_started_and_every_rank_enters_it(make_stage: MakeStage, tmp_path: Path) -> None:
    log = tmp_path / "holders"
    command = shell('kill -0 "$HOLDER" && echo "in $HOLDER, ${VJOB_ENTER-nothing}"')
    stage = make_held(make_stage, STAYS.format(log=log), *command, ranks=4)
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0), outcome
    [holder] = read_holders(log)
    assert stage.log("n0", "out").count(f"in {holder}, nothing") == 4
    assert not is_running(holder)
    assert "left behind" not in stage.log("n0", "err")
    report = read_report(stage.attempt, 0)
    assert report is not None
    assert "stand-in started in" in [c for c in report.checks if c.name == "container"][-1].text


def test_one_that_fails_keeps_the_node_from_ready(make_stage: MakeStage) -> None:
    """Before, each rank found out by itself, after all nodes had said that they were ready."""
    stage = make_held(make_stage, "echo out of dough >&2; exit 3", "echo", "never")
    row = KnownLine("dough", r"out of \w+", Scope.CONTAINER, remedies=(do("add butter"),))
    write_known_lines(stage.run, [row])
    codes, outcome = stage.play()
    assert outcome.code != 0 and codes == [outcome.code]
    assert "stand-in: out of dough -> add butter" in outcome.reason
    assert "never" not in stage.log("n0", "out")


def test_one_that_found_the_lock_taken_is_started_again(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    log, seen = tmp_path / "holders", tmp_path / "seen"
    hold = f"[ -e {seen} ] || {{ touch {seen}; echo locked >&2; exit 1; }}; {STAYS.format(log=log)}"
    codes, outcome = make_held(make_stage, hold, "true").play()
    assert (codes, outcome.code) == ([0], 0), outcome
    assert len(read_holders(log)) == 1


def test_one_that_never_speaks_is_ended(make_stage: MakeStage, tmp_path: Path) -> None:
    log = tmp_path / "holders"
    timing = replace(make_plan().timing, prepare_s=1.0)
    hold = f"echo $$ >{log}; echo waiting >&2; sleep 600"
    _, outcome = make_held(make_stage, hold, "true", timing=timing).play()
    assert "took too long and was ended: waiting" in outcome.reason
    assert not any(map(is_running, read_holders(log)))


def test_ranks_outlive_it_and_it_dies_with_the_agent(make_stage: MakeStage, tmp_path: Path) -> None:
    log = tmp_path / "holders"
    code = "import os, time; print('ready', os.getpid(), flush=True); time.sleep(600)"
    stage = make_held(make_stage, STAYS.format(log=log), sys.executable, "-c", code, ranks=1)
    stage.open()
    agent = stage.start(0)
    pid = int(stage.wait_for_log("n0", "out", "ready").split()[2])
    [holder] = read_holders(log)
    agent.kill()
    agent.wait()
    wait_until(lambda: not is_running(holder) and not is_running(pid), "the end of both")

    stage.call("close", "--status", "137")
    stage.open(attempt=1)
    agent = stage.start(0, attempt=1)
    path = stage.run.attempt(1).node_log("n0", "out")
    wait_until(lambda: path.exists() and "ready" in path.read_text(), "the rank")
    os.kill(read_holders(log)[-1], signal.SIGKILL)
    agent.terminate()
    assert agent.wait() == 143

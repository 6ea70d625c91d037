"""`vjob stacks` on real runs: the rank that is elsewhere is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.stacks.collect import Answers, StackQuery
from vjob.jobs.schedulers.slurm.scheduler import SlurmScheduler


def test_commands_run_together_and_the_late_one_is_ended(tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []
    late = f"echo $$ > {tmp_path}/pid; echo began; exec sleep 60"
    codes = process.run_together(
        [["sh", "-c", "echo one; exit 3"], ["sh", "-c", late]],
        lambda number, line: heard.append((number, line)),
        env=dict(os.environ),
        timeout_s=2,
    )
    assert codes == [3, None]
    assert {(0, "one"), (1, "began")} <= set(heard)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_command_that_is_not_there_is_said_and_the_others_end(tmp_path: Path) -> None:
    with pytest.raises(VjobError, match="/no/such cannot be started"):
        process.run_together(
            [["sleep", "60"], ["/no/such"]], lambda *_: None, env=dict(os.environ), timeout_s=5
        )


CONF = """
name: odd
program: {{script: {script}, args: ["{odd}"]}}
cluster:
  scheduler: local
  hetero: {hetero}
  walltime_min: 2
  grace_s: 2
  nodes:
    - {{group: m, count: 2, ranks: 2}}
    - {{group: s, count: 1, ranks: 1}}
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def submit_odd(vjob: Vjob, odd: int, hetero: str = "hetjob") -> RunFolder:
    run = vjob.submit(CONF.format(script=PROGRAMS / "stray_rank.py", odd=odd, hetero=hetero))
    wait_for(lambda: read_out(run).count("ready") == 5, 60, lambda: vjob.explain(run))
    wait_for_beats(run, 3, lambda beat: beat.get("ranks"))
    return run


def wait_for_beats(run: RunFolder, count: int, accept: Callable[[Any], Any]) -> None:
    attempt = run.attempt(0)
    wait_for(
        lambda: all(accept(read_json(attempt.beat(index)) or {}) for index in range(count)), 60
    )


@pytest.mark.parametrize("hetero", ["hetjob", "split"])
def test_the_rank_that_is_elsewhere_is_found(vjob: Vjob, hetero: str) -> None:
    run = submit_odd(vjob, 3, hetero)
    try:
        found = json.loads(vjob("stacks", str(run.path), "--json").stdout)
        assert [group["ranks"] for group in found["groups"]] == [[3], [0, 1, 2, 4]]
        assert found["groups"][0]["nodes"] == ["local1"]
        assert (found["failed"], found["silent_nodes"]) == ([], {})
        text = vjob("stacks", str(run.path)).stdout
        assert text.startswith("5 of 5 ranks, 2 different stacks")
        assert text.index("load_data (programs/stray_rank.py:") < text.index(
            "wait_for_the_others ("
        )
        assert "beside" not in text
        native = json.loads(vjob("stacks", str(run.path), "--native", "--json").stdout)
        assert [group["ranks"] for group in native["groups"]] == [[3], [0, 1, 2, 4]]
        full = vjob("stacks", str(run.path), "--full").stdout
        assert "MainThread" in full and "beside" in full
    finally:
        vjob("cancel", str(run.path), "--now")


def test_stopped_and_ended_ranks_are_told(vjob: Vjob) -> None:
    run = submit_odd(vjob, -1)
    pid = read_json(run.attempt(0).beat(1))["ranks"]["2"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = json.loads(vjob("stacks", str(run.path), "--json").stdout)
        assert [group["ranks"] for group in found["groups"]] == [[2], [0, 1, 3, 4]]
        assert found["groups"][0]["stacks"][0]["state"] == "T"
    finally:
        vjob("cancel", str(run.path), "--now")
    said = vjob("stacks", str(run.path), code=2).stderr
    assert "is not running" in said


def test_a_rank_that_is_no_python_is_said_and_a_shell_is_looked_through(vjob: Vjob) -> None:
    script = vjob.folder / "start.py"
    script.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    os.execvp('sleep', ['sleep', '120'])\n"
        f"line = sys.executable + ' {PROGRAMS}/stray_rank.py 1; exit 0'\n"
        "os.execvp('sh', ['sh', '-c', line])\n"
    )
    conf = (
        "name: shell\nprogram: {script: start.py}\n"
        "cluster: {scheduler: local, walltime_min: 2, grace_s: 2, nodes: "
        "[{group: m, count: 1, ranks: 2}]}\n"
    )
    run = vjob.submit(conf)
    wait_for(lambda: "ready" in read_out(run), 60, lambda: vjob.explain(run))
    wait_for_beats(run, 1, lambda beat: len(beat.get("ranks", ())) == 2)
    try:
        found = json.loads(vjob("stacks", str(run.path), "--json").stdout)
        assert [group["ranks"] for group in found["groups"]] == [[1]]
        assert [rank["rank"] for rank in found["failed"]] == [0]
        assert "python" in found["failed"][0]["problem"].lower()
    finally:
        vjob("cancel", str(run.path), "--now")


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """As a terminal does it: to vjob alone, whose children are in sessions of their own."""
    code = (
        "import os, sys\nfrom vjob.jobs import process\n"
        f"process.run_together([['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60']], "
        "lambda *_: None, env=dict(os.environ), timeout_s=60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    pid_file = tmp_path / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip(), 20)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=30) != 0
    # One that was just being started is told by the kernel, once vjob is gone.
    wait_for(lambda: not Path(f"/proc/{pid_file.read_text().strip()}").exists(), 20)


def test_a_controller_that_is_away_is_no_expired_job() -> None:
    said = (
        "srun: error: Unable to confirm allocation for job 9: Unable to contact slurm controller "
        "(connect failure)",
        "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 9",
    )
    query = StackQuery(command=["srun"])
    answers = Answers([query], {0: "n0"}, lambda done, all_: None, SlurmScheduler())
    for line in said:
        answers.hear(0, line)
    with pytest.raises(VjobError, match="asked: Slurm's controller does not answer: try again"):
        answers.close([1], 60.0)

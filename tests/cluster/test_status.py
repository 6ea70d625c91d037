"""`vjob status` on the lab's real Slurm: each fate gets its verdict, no healthy job a bad one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE
from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob, read_out, wait_for
from tests.small_training import write_slow_steps, write_text
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CONF = """
name: watched
program: pretrain_gpt
model: {{layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}}
data: {{prefix: text, split: "10,0,0"}}
train:
  steps: {steps}
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {{name: sgd, lr: {lr}}}
  log_every: 5
  evaluate: {{every: 0}}
  checkpoint: {{folder: checkpoints, every: 50}}
parallel: {{pipeline: 2, data: 2}}
cluster:
  scheduler: slurm
  walltime_min: 10
  grace_s: 3
  lost_s: 15
  nodes: [{{group: all, count: 4, queue: gpu2, ranks: 1}}]
env: {{OMP_NUM_THREADS: "1", PYTHONPATH: calm}}
"""
SCRIPT = """
name: told
program: {{script: {script}, args: {args}}}
cluster:
  scheduler: slurm
  walltime_min: 5
  grace_s: 3
  nodes: [{{group: pair, count: {count}, queue: gpu2, ranks: 2}}]
"""


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


@pytest.fixture
def tokens(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    write_text(tmp_path)
    write_slow_steps(tmp_path / "calm")


def look(vjob: Vjob, run: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = vjob.status(str(run.path))["verdict"]
    return found


def wait_for_verdict(vjob: Vjob, run: RunFolder, health: str, timeout_s: float) -> dict[str, Any]:
    """The verdict once it is this one; all that were seen on the way if it never is."""
    seen: list[str] = []
    deadline = time.monotonic() + timeout_s * PATIENCE
    while True:
        found = look(vjob, run)
        if found["health"] == health:
            return found
        if seen[-1:] != [f"{found['health']}: {found['reason']}"]:
            seen.append(f"{found['health']}: {found['reason']}")
        assert time.monotonic() < deadline, "\n".join([*seen, vjob.explain(run)])


def train(vjob: Vjob, steps: int = 100_000, lr: str = "1.0e-3") -> RunFolder:
    """A training that has done its first steps."""
    run = vjob.submit(CONF.format(steps=steps, lr=lr))
    wait_for(lambda: "iteration " in read_out(run), 120, lambda: vjob.explain(run))
    return run


def find_rank(run: RunFolder, rank: int) -> tuple[int, str]:
    """Its process and its node, as the node's agent tells them."""
    for path in run.attempt(0).path.glob("beat/*.json"):
        beat = read_json(path)
        if str(rank) in (beat or {}).get("ranks", {}):
            return int(beat["ranks"][str(rank)]["pid"]), str(beat["host"])
    raise AssertionError(f"no beat tells of rank {rank}")


def test_a_training_is_healthy_until_it_is_done(vjob: Vjob, tokens: None) -> None:
    run = train(vjob, steps=150)
    wait_for_verdict(vjob, run, "HEALTHY", 60)
    assert vjob.wait_over(run, 240)["verdict"] == "COMPLETED", vjob.explain(run)
    found = look(vjob, run)
    assert (found["health"], found["exit_code"]) == ("DONE", 0)
    yesterday = time.time() - 24 * 3600
    for path in run.path.rglob("*"):
        os.utime(path, (yesterday, yesterday), follow_symlinks=False)
    assert look(vjob, run)["health"] == "DONE"


@pytest.mark.long
def test_a_rank_that_was_stopped_is_found_and_its_node_named(vjob: Vjob, tokens: None) -> None:
    run = train(vjob)
    wait_for_verdict(vjob, run, "HEALTHY", 60)
    pid, node = find_rank(run, 2)
    os.kill(pid, signal.SIGSTOP)
    try:
        found = wait_for_verdict(vjob, run, "STALLED", 200)
        assert (found["rank"], found["node"]) == (2, node), found
        assert "stopped" in found["reason"] and found["exit_code"] == 14
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_verdict(vjob, run, "HEALTHY", 60)
    vjob("cancel", str(run.path), "--now")


def test_a_rank_that_was_killed_is_named_with_its_signal(vjob: Vjob, tokens: None) -> None:
    run = train(vjob)
    pid, node = find_rank(run, 1)
    os.kill(pid, signal.SIGKILL)
    found = wait_for_verdict(vjob, run, "DEAD", 60)
    assert (found["rank"], found["node"], found["exit_code"]) == (1, node, 10)
    assert "SIGKILL" in found["reason"]


@pytest.mark.long
def test_a_loss_that_is_no_number_is_told(vjob: Vjob, tokens: None) -> None:
    run = train(vjob, lr="1.0e+30")
    found = wait_for_verdict(vjob, run, "FAILING", 60)
    assert "loss" in found["reason"] and found["exit_code"] == 15
    assert any("nan" in line["text"].lower() for line in found["evidence"])
    vjob("cancel", str(run.path), "--now")


def test_settings_that_are_not_the_confs_are_told_at_once(vjob: Vjob) -> None:
    run = vjob.submit(SCRIPT.format(script=PROGRAMS / "print_settings.py", args='["16"]', count=2))
    found = wait_for_verdict(vjob, run, "FAILING", 60)
    assert "WORLD_SIZE" in found["reason"] and "16" in found["reason"] and "4" in found["reason"]
    vjob("cancel", str(run.path), "--now")


@pytest.mark.long
def test_a_node_without_power_is_named(vjob: Vjob, clean_lab: Lab, tokens: None) -> None:
    run = train(vjob)
    clean_lab.crash_node("b3")
    found = wait_for_verdict(vjob, run, "DEAD", 120)
    assert found["node"] == "b3" and "lost" in found["reason"]


def test_a_job_that_can_never_run_pends_with_its_reason_and_the_remedy(vjob: Vjob) -> None:
    run = vjob.submit(SCRIPT.format(script=PROGRAMS / "report_rank.py", args="[]", count=9))
    found = look(vjob, run)
    assert (found["health"], found["exit_code"]) == ("PENDING", 12)
    assert "lower count" in found["reason"] + found["advice"]
    vjob("cancel", str(run.path), "--now")


def test_a_job_that_waits_for_others_pends_and_says_why(vjob: Vjob) -> None:
    alone = SCRIPT.replace("grace_s: 3", "grace_s: 3\n  sbatch: {{exclusive: true}}")
    first = vjob.submit(
        alone.format(script=PROGRAMS / "fail_as_told.py", args='["-1", hang]', count=4)
    )
    wait_for(lambda: "ready" in read_out(first), 60, lambda: vjob.explain(first))
    run = vjob.submit(SCRIPT.format(script=PROGRAMS / "report_rank.py", args="[]", count=4))
    found = wait_for_verdict(vjob, run, "PENDING", 10)
    assert found["exit_code"] == 0
    wait_for(
        lambda: "Resources" in look(vjob, run)["reason"], 30, lambda: json.dumps(look(vjob, run))
    )
    vjob("cancel", str(run.path), "--now")  # before it can start
    vjob("cancel", str(first.path), "--now")

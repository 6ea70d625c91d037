"""A run on this machine that loses a node, and goes on without it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.command import Vjob, wait_for
from tests.small_training import list_morphs, read_losses, write_slow_steps, write_text
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.files import read_json
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

CONF = """
name: curve
program: pretrain_gpt
model: {{layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}}
data: {{prefix: text, split: "8,2,0"}}
train:
  steps: {steps}
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {{lr: 1.0e-2, weight_decay: 0.1}}
  schedule: {{warmup_steps: 2, min_lr: 1.0e-3}}
  log_every: 1
  evaluate: {{every: 0}}
  checkpoint: {{folder: ckpt, every: 10, keep: 2}}
parallel: {{pipeline: 4}}
cluster:
  scheduler: local
  walltime_min: 5
  grace_s: 5
  join_s: 30
  nodes: [{{group: all, count: 4, ranks: 1}}]
morph: {{enabled: true, min_nodes: {min_nodes}, warm: false}}
env: {{OMP_NUM_THREADS: "1", PYTHONPATH: calm}}
"""
"""Without ranks that wait: twice as many would start."""
WARM = CONF.replace(", warm: false", "")


def take_two(text: str) -> str:
    """For what has nothing to do with how many nodes there are."""
    return text.replace("count: 4", "count: 2").replace("pipeline: 4", "pipeline: 2")


STEPS = 60


pytestmark = pytest.mark.slow


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    pytest.importorskip("torch", reason="torch is not installed")
    write_text(tmp_path)
    write_slow_steps(tmp_path / "calm")
    return Vjob(tmp_path)


def read_presence(run: RunFolder, seat: int) -> dict[str, Any]:
    value: dict[str, Any] = read_json(run.morph.node(seat))
    return value


def kill_node(run: RunFolder, seat: int) -> None:
    """The agent that stays, and by that the attempt's agent and its ranks."""
    os.kill(read_presence(run, seat)["pid"], signal.SIGKILL)


def wait_for_checkpoint(vjob: Vjob, run: RunFolder, iteration: int) -> None:
    def is_there() -> bool:
        complete = list_complete(vjob.folder / "ckpt")
        return bool(complete) and complete[-1].iteration >= iteration

    wait_for(is_there, 120, lambda: vjob.explain(run))


@pytest.mark.long
def test_a_run_that_loses_a_node_goes_on_with_the_rest_and_the_same_loss(vjob: Vjob) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    run = vjob.submit(WARM.format(steps=STEPS, min_nodes=2))
    wait_for_checkpoint(vjob, run, 10)
    kill_node(run, 3)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0, 1]
    plan = read_attempt_plan(run, 1)
    assert plan is not None and (plan.pipeline, plan.data, plan.num_nodes) == (3, 1, 3)
    (morph,) = list_morphs(run)
    assert (morph["from"], morph["to"], morph["nodes"]) == ("4 x 1", "3 x 1", [0, 1, 2])
    assert morph["iteration"] >= 10
    assert "morphed from 4 x 1 to 3 x 1, " in vjob("status", str(run.path), code=None).stdout
    losses, _ = train_plainly(read_training(run.training))
    assert read_losses(run) == pytest.approx(losses, rel=2e-5)
    outcomes = json.loads(run.attempt(0).outcome.read_text())
    assert outcomes["code"] != 0


@pytest.mark.long
def test_a_killed_manager_goes_on_where_it_was(vjob: Vjob) -> None:
    run = vjob.submit(take_two(CONF).format(steps=STEPS, min_nodes=1))
    wait_for_checkpoint(vjob, run, 10)
    os.kill(find_manager(run), signal.SIGKILL)
    kill_node(run, 0)  # rank 0 and the store are on it; nobody manages now
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert "manager ended with 137 (1 in a row)" in run.scheduler_log().read_text()
    assert [attempt.number for attempt in run.attempts()] == [0, 1]
    assert sorted(read_losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.long
def test_with_too_few_nodes_it_waits_then_ends_and_says_what_is_safe(vjob: Vjob) -> None:
    text = take_two(CONF).format(steps=5000, min_nodes=2)
    run = vjob.submit(text.replace("join_s: 30", "join_s: 15"))
    wait_for_checkpoint(vjob, run, 10)
    kill_node(run, 1)
    record = vjob.wait_over(run, 120)
    assert record["verdict"] == "FAILED"
    assert "1 node is here, at least 2 are needed" in record["message"]
    assert "the checkpoint of iteration" in record["message"]
    assert "local1 was lost" in record["message"]
    assert (record["outcome"]["code"], record["end"]["node"]) == (113, "local1")
    assert [attempt.number for attempt in run.attempts()] == [0]


@pytest.mark.long
def test_a_run_that_makes_no_progress_stops_and_says_why(vjob: Vjob) -> None:
    run = vjob.submit(take_two(CONF).format(steps=20, min_nodes=1))
    assert vjob.wait_over(run, 120)["verdict"] == "COMPLETED", vjob.explain(run)
    for path in (vjob.folder / "ckpt").rglob("segment*"):
        path.write_bytes(b"damaged")
    run = vjob.submit(take_two(CONF).format(steps=40, min_nodes=1))
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "FAILED"
    assert record["message"].startswith("rank ")
    assert record["message"].endswith("; no new checkpoint in 3 attempts")
    assert [attempt.number for attempt in run.attempts()] == [0, 1, 2]


def test_cancel_saves_and_ends_the_run(vjob: Vjob) -> None:
    run = vjob.submit(take_two(CONF).format(steps=5000, min_nodes=2))
    wait_for_checkpoint(vjob, run, 10)
    assert "saved and left" in vjob("cancel", "last").stdout
    assert [attempt.number for attempt in run.attempts()] == [0]


def find_manager(run: RunFolder) -> int:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"manage" in words and bytes(run.path) in words:
                return int(folder.name)
    raise AssertionError("no manager runs")


def test_called_to_leave_it_saves_comes_back_and_trains_to_the_end(vjob: Vjob) -> None:
    """What the warning of the time limit, or of a preemption, does to the batch script."""
    text = take_two(CONF).format(steps=STEPS, min_nodes=2)
    run = vjob.submit(text.replace("join_s: 30", "join_s: 30\n  requeue: true"))
    wait_for_checkpoint(vjob, run, 10)
    os.kill(read_json(run.path / "local.json")["pid"], signal.SIGUSR1)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0, 1]
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("requeued") == 1 and kinds.count("morph") == 0
    assert sorted(read_losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.long
def test_told_to_end_it_ends_all_ranks(vjob: Vjob) -> None:
    run = vjob.submit(take_two(WARM).format(steps=5000, min_nodes=2))
    wait_for_checkpoint(vjob, run, 10)
    vjob("cancel", "last", "--now")
    record = vjob.wait_over(run, 60)
    assert record["verdict"] == "CANCELLED", vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0]
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if names_run(path, run)]
    assert left == []


def names_run(path: Path, run: RunFolder) -> bool:
    try:
        return bytes(run.path) in path.read_bytes()
    except OSError:
        return False

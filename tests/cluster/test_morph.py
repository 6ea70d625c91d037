"""On the real Slurm of the lab: nodes go and come, and the training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob, wait_for
from tests.reports.counted import ask_sacct, compare
from tests.small_training import list_morphs, read_losses, write_slow_steps, write_text
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.files import read_json
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CONF = """
name: elastic
program: pretrain_gpt
model: {layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}
data: {prefix: text, split: "8,2,0"}
train:
  steps: 60
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {lr: 1.0e-2, weight_decay: 0.1}
  schedule: {warmup_steps: 2, min_lr: 1.0e-3}
  log_every: 1
  evaluate: {every: 0}
  checkpoint: {folder: ckpt, every: 10, keep: 2}
parallel: {pipeline: 4}
cluster:
  scheduler: slurm
  walltime_min: 10
  grace_s: 5
  join_s: 60
  lost_s: 15
  nodes: [{group: all, count: 4, queue: gpu2, ranks: 1}]
morph: {enabled: true, min_nodes: 2, warm: false}
env: {OMP_NUM_THREADS: "1", PYTHONPATH: calm}
"""
"""Without ranks that wait: twice as many would start."""
WARM = CONF.replace(", warm: false", "")


BUSY_S = 15.0
"""So late a prolog or a line may be on a busy machine."""


def assert_accounted_for(lab: Lab, run: RunFolder) -> None:
    """Every second of the run has a class, as a count from the raw files has it."""
    result = compare(run.path, ask_sacct(lab, run), edge_s=BUSY_S)
    assert result.find_problems() == []
    assert not {"memory", "swap", "limit"} & {*result.causes}


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    pytest.importorskip("torch", reason="torch is not installed")
    write_text(tmp_path)
    write_slow_steps(tmp_path / "calm")
    clean_lab.wait_idle()  # a job that takes fewer nodes would take what there is
    return Vjob(tmp_path, clean_lab.env)


@pytest.mark.long
def test_a_node_without_power_is_left_behind(clean_lab: Lab, vjob: Vjob, tmp_path: Path) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    run = vjob.submit(WARM)
    wait_for(lambda: list_complete(tmp_path / "ckpt"), 120, lambda: vjob.explain(run))
    victim = read_json(run.morph.node(3))["host"]
    clean_lab.crash_node(victim)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    (morph,) = list_morphs(run)
    assert (morph["from"], morph["to"], morph["nodes"]) == ("4 x 1", "3 x 1", [0, 1, 2])
    assert victim in morph["reason"]
    losses, _ = train_plainly(read_training(run.training))
    assert read_losses(run) == pytest.approx(losses, rel=2e-5)
    assert_accounted_for(clean_lab, run)


@pytest.mark.long
def test_a_job_of_another_queue_joins_and_is_cancelled(clean_lab: Lab, vjob: Vjob) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    text = CONF.replace("steps: 60", "steps: 20000").replace("pipeline: 4", "pipeline: 1")
    text = text.replace("count: 4, queue: gpu2", "count: 1, queue: gpu1")
    run = vjob.submit(text.replace("min_nodes: 2", "min_nodes: 1, max_nodes: 2"))
    wait_for(lambda: list_complete(vjob.folder / "ckpt"), 120, lambda: vjob.explain(run))
    words = ("grow", run.name, "--count", "1", "--queue", "gpu2", "--json")
    job = json.loads(vjob(*words).stdout)["job"]
    wait_for(lambda: len(list_morphs(run)) == 1, 120, lambda: vjob.explain(run))
    assert f"joined by job {job}  RUNNING" in vjob("status", run.name, "--once", code=None).stdout
    said = vjob("stacks", run.name).stdout
    assert "b1" in said and "a1" in said, said
    clean_lab.run(["scancel", job])
    wait_for(lambda: len(list_morphs(run)) == 2, 120, lambda: vjob.explain(run))
    more = list_morphs(run)[1]["iteration"] + 10
    wait_for(lambda: list_complete(vjob.folder / "ckpt")[-1].iteration >= more, 120)
    assert "saved and left" in vjob("cancel", run.name).stdout
    assert vjob.wait_over(run, 60)["verdict"] == "CANCELLED", vjob.explain(run)
    assert [morph["to"] for morph in list_morphs(run)] == ["1 x 2", "1 x 1"]
    found = read_losses(run)
    losses, _ = train_plainly(read_training(run.training), last=max(found))
    assert found == pytest.approx(losses, rel=2e-5)


def test_a_het_job_goes_on_without_its_second_component(clean_lab: Lab, vjob: Vjob) -> None:
    text = CONF.replace("pipeline: 4", "pipeline: 3").replace("min_nodes: 2", "min_nodes: 1")
    groups = "{group: one, queue: gpu1, ranks: 1}, {group: two, count: 2, queue: gpu2, ranks: 1}"
    text = text.replace("  scheduler", "  hetero: hetjob\n  scheduler")
    run = vjob.submit(text.replace("{group: all, count: 4, queue: gpu2, ranks: 1}", groups))
    wait_for(lambda: list_complete(vjob.folder / "ckpt"), 120, lambda: vjob.explain(run))
    leader = json.loads(run.record.read_text())["jobs"][0]["id"]
    clean_lab.run(["scancel", f"{leader}+1"])
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert [(morph["from"], morph["to"]) for morph in list_morphs(run)] == [("3 x 1", "1 x 1")]
    assert sorted(read_losses(run)) == list(range(1, 61))
    assert_accounted_for(clean_lab, run)


@pytest.mark.long
def test_a_requeued_job_comes_back_with_the_nodes_that_there_are(
    clean_lab: Lab, vjob: Vjob
) -> None:
    text = CONF.replace("count: 4, queue: gpu2", "count: 2, queue: gpu1")
    text = text.replace("pipeline: 4", "pipeline: 2").replace("min_nodes: 2", "min_nodes: 1")
    run = vjob.submit(text.replace("  lost_s: 15", "  lost_s: 15\n  requeue: true"))
    wait_for(lambda: list_complete(vjob.folder / "ckpt"), 120, lambda: vjob.explain(run))
    job = json.loads(run.record.read_text())["jobs"][0]["id"]
    host = read_json(run.morph.node(1))["host"]
    clean_lab.run(["scontrol", "update", f"nodename={host}", "state=drain", "reason=test"])
    clean_lab.run(["scancel", "--batch", "--signal=USR1", job])
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    plans = [read_attempt_plan(run, attempt.number) for attempt in run.attempts()]
    assert [plan.num_nodes for plan in plans if plan is not None] == [2, 1]
    assert sorted(read_losses(run)) == list(range(1, 61))
    assert_accounted_for(clean_lab, run)

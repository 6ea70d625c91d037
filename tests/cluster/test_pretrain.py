"""A GPT trained by `vjob submit` over four nodes has the loss curve of one plain process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob, read_out
from tests.reports.counted import ask_sacct, compare
from tests.small_training import write_text
from tests.varuna_core.agent.track.readers import read_prometheus, read_tensorboard
from varuna_core.records.training import read_training
from vjob.reports.load.tables import load_job

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CONF = """
name: curve
program: pretrain_gpt
model: {{layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}}
data: {{prefix: text, split: "8,2,0"}}
train:
  steps: 6
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {{lr: 1.0e-2, weight_decay: 0.1}}
  schedule: {{warmup_steps: 2, min_lr: 1.0e-3}}
  log_every: 1
  evaluate: {{every: 0}}
parallel: {{pipeline: {pipeline}, partition: {partition}}}
cluster:
  scheduler: slurm
  walltime_min: 5
  nodes: [{{group: all, count: 4, queue: gpu2, ranks: 1}}]
track: {{tensorboard: true, openmetrics: curve.prom}}
env: {{OMP_NUM_THREADS: "1"}}
"""


@pytest.mark.parametrize(
    "partition", ["1-0-3-0", *(pytest.param(one, marks=pytest.mark.long) for one in ("3-1", "4"))]
)
def test_a_gpt_over_four_nodes_has_the_loss_curve_of_one_plain_process(
    clean_lab: Lab, tmp_path: Path, partition: str
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.varuna_core.programs.reference_training import train_plainly

    write_text(tmp_path)
    vjob = Vjob(tmp_path, clean_lab.env)
    pipeline = len(partition.split("-"))
    run = vjob.submit(CONF.format(pipeline=pipeline, partition=partition))
    assert vjob.wait_over(run, 240)["verdict"] == "COMPLETED", vjob.explain(run)
    lines = re.findall(r" iteration +(\d+)/.*? lm loss: (\S+)", read_out(run))
    losses, _ = train_plainly(read_training(run.training))
    assert losses[6] < losses[1] - 0.1
    assert {int(step): float(loss) for step, loss in lines} == pytest.approx(losses, rel=2e-5)
    assert_report_agrees_with_log(run.path, last_rank=3)
    tracked = read_tensorboard(run.tensorboard)["loss"]
    assert dict(tracked) == pytest.approx(losses, rel=2e-5), "read from the last rank's node"
    assert [step for step, _ in tracked] == [*range(1, 7)]
    gauges = read_prometheus((tmp_path / "curve.prom").read_text())
    assert [*gauges["vjob_step"].values()] == [6.0] and [*gauges["vjob_run_up"].values()] == [0.0]
    assert compare(run.path, ask_sacct(clean_lab, run), edge_s=15).find_problems() == []


def assert_report_agrees_with_log(run: Path, last_rank: int) -> None:
    """To the millisecond, step by step; a pause of the machine may fall between the two clocks."""
    job = load_job(run)
    assert job.skipped == {}
    traced = job.traces.steps[job.traces.steps["rank"] == last_rank].set_index("step")["took_s"]
    logged = job.logs["iterations"].set_index("step")["time_ms"]
    assert set(traced.index) == set(logged.index) == set(range(1, 7))
    apart_ms = (1000 * traced - logged).abs()
    assert apart_ms.median() < 1, apart_ms.to_dict()

"""On the real Slurm of the lab: a node without power, and the training goes on without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob, read_out, wait_for
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.events import read_events
from varuna_core.records.files import read_json
from varuna_core.records.training import read_training

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CONF = """
name: elastic
program: pretrain_gpt
model: {layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}
data: {prefix: text, split: "8,2,0"}
train:
  steps: 150
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
morph: {enabled: true, min_nodes: 2}
env: {OMP_NUM_THREADS: "1"}
"""


def test_a_node_without_power_is_left_behind(clean_lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.varuna_core.data.tokens import write_tokens
    from tests.varuna_core.programs.plain import train_plainly

    documents = [[[(start + k) % 60 for k in range(40)]] for start in range(60)]
    write_tokens(tmp_path / "text", documents)
    vjob = Vjob(tmp_path, clean_lab.env)
    run = vjob.submit(CONF)
    wait_for(lambda: list_complete(tmp_path / "ckpt"), 120, lambda: vjob.explain(run))
    victim = read_json(run.morph.node(3))["host"]
    clean_lab.crash_node(victim)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    (morph,) = [event for event in read_events(run) if event["kind"] == "morph"]
    assert (morph["from"], morph["to"], morph["nodes"]) == ("4 x 1", "3 x 1", [0, 1, 2])
    assert victim in morph["reason"]
    found = {}
    for attempt in (0, 1):
        for step, loss in re.findall(
            r" iteration +(\d+)/.*? lm loss: (\S+)", read_out(run, attempt)
        ):
            found[int(step)] = float(loss)
    losses, _ = train_plainly(read_training(run.training))
    assert found == pytest.approx(losses, rel=2e-5)

"""A script that gives Varuna no layout and no sizes trains as its conf says, to the last bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command import PROGRAMS, Vjob, read_out
from varuna_core.records.runfolder import RunFolder

CONF = f"""
name: own
program: {{script: {PROGRAMS}/own_script.py}}
parallel: {{pipeline: 2, order: pipeline}}
cluster: {{scheduler: local, walltime_min: 3, nodes: [{{group: all, ranks: 4}}]}}
env: {{PYTHONPATH: "{ROOT}", OMP_NUM_THREADS: "1"}}
"""
TRAIN = """
train:
  global_batch_size: 8
  micro_batch_size: 2
  precision: bf16
  seed: 7
  log_every: 1
  checkpoint: {folder: saved, keep: 1}
"""
PARALLEL = "pipeline: 2, partition: 1-3, schedule: gpipe, recompute: full, zero: 1"
EXPLICIT = {
    "batch_size": 8,
    "chunk_size": 2,
    "precision": "bf16",
    "seed": 7,
    "partition": "1-3",
    "schedule": "gpipe",
    "recompute": "full",
    "zero": 1,
}
FACTS = ["gpipe", [2, 4], 2, 8, "bf16"]


def train(vjob: Vjob, text: str) -> tuple[RunFolder, set[str], dict[str, str]]:
    """The run, what its ranks said that they train with, and the losses."""
    run = vjob.submit(text)
    record = vjob.wait_over(run, 120)
    said = read_out(run)
    assert record["verdict"] == "COMPLETED", said + vjob.explain(run)
    losses = dict(re.findall(r"step (\d)/3 loss (\S+)", said))
    assert len(losses) == 3
    return run, set(re.findall(r"facts (.*)", said)), losses


def check_trace(run: RunFolder) -> None:
    """Each rank wrote its steps, what it did in them, and how far its clock is from rank 0's."""
    (path,) = run.path.rglob("trace/*.jsonl")
    ranks: dict[int, list[Any]] = {}
    own: list[Any] = []
    for line in map(json.loads, filter(None, path.read_text().splitlines())):
        if isinstance(line, dict) and list(line) == ["rank"]:
            own = ranks.setdefault(line["rank"], [])
        else:
            own.append(line)
    assert sorted(ranks) == [0, 1, 2, 3]
    for rank, (head, *lines) in ranks.items():
        assert head["partition"] == "1-3" and head["stages"] == [rank % 2]
        steps = [line for line in lines if isinstance(line, dict) and "step" in line]
        assert [line["step"] for line in steps] == [1, 2, 3]
        assert all({"f", "B", "optimizer"} <= line["sums"].keys() for line in steps)
        assert "checkpoint" in steps[-1]["sums"]
        assert any("offset" in line for line in lines) == (rank != 0)


@pytest.mark.slow
def test_a_script_trains_as_its_conf_says(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "args").mkdir()
    written = CONF.replace("pipeline: 2", PARALLEL) + TRAIN
    run, facts, losses = train(Vjob(tmp_path / "conf"), written)
    assert (tmp_path / "conf/saved/varuna_ckpt_3").is_dir()
    check_trace(run)
    assert list(map(json.loads, facts)) == [FACTS]
    program = f"{{script: {PROGRAMS}/own_script.py, args: [--explicit, '{json.dumps(EXPLICIT)}']}}"
    by_hand = CONF.replace(f"{{script: {PROGRAMS}/own_script.py}}", program)
    by_hand += "profile: {timeline: false}\n"
    run, facts_by_hand, losses_by_hand = train(Vjob(tmp_path / "args"), by_hand)
    assert not list(run.path.rglob("trace/*.jsonl"))
    assert facts_by_hand == facts and losses_by_hand == losses

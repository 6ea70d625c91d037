"""Engines that are not ours on two groups of the lab: a conf alone gives a report of pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob, read_out
from tests.varuna_core.trace.test_engines import (
    NUM_MICRO_BATCHES,
    order_1f1b,
)
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 3
CONF = """
name: {name}
program: {program}
profile: {{timeline: true}}
parallel: {{pipeline: 2}}
env: {{DS_ACCELERATOR: cpu}}
cluster:
  scheduler: slurm
  walltime_min: 30
  nodes:
    - {{group: weak, count: 1, queue: gpu2, ranks: 1, cpus: 1}}
    - {{group: strong, count: 1, queue: gpu1, ranks: 1, cpus: 1}}
"""
ENGINES = {
    "megatron": "{script: megatron_core.py, args: ['3', 'Ettt|tL']}",
    "deepspeed": "{deepspeed: deepspeed_pipeline.py, args: ['3', uneven]}",
    "pipelining": "{script: pipelining.py, args: ['3', order, 1F1B]}",
}
"""Of the first two the second stage is the shorter one: one layer of four, and two of eight."""
LIBRARIES = {"megatron": "megatron.core", "deepspeed": "deepspeed"}


@pytest.mark.parametrize(
    "names",
    [["pipelining"], pytest.param(["megatron", "deepspeed"], marks=pytest.mark.long)],
    ids=" and ".join,
)
def test_each_has_its_stages_micro_batches_and_bubble(
    clean_lab: Lab, tmp_path: Path, names: list[str]
) -> None:
    for name in set(names) & set(LIBRARIES):
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    vjob = Vjob(tmp_path, clean_lab.env)
    for script in (PROGRAMS / "engines").glob("*.py"):
        (tmp_path / script.name).write_text(script.read_text())
    runs = [vjob.submit(CONF.format(name=name, program=ENGINES[name])) for name in names]
    for run in runs:
        assert vjob.wait_over(run, 300)["verdict"] == "COMPLETED", vjob.explain(run)
        job = load_job(run.path)
        events = job.events.sort_values("begin_s")
        acts = events[events["kind"].isin(["F", "B"]) & (events["what"] != "goes on")]
        for (stage, step), own in acts.groupby(["stage", "step"]):
            found = [f"{stage}{k}{m}" for k, m in zip(own["kind"], own["microbatch"], strict=True)]
            assert found == order_1f1b(int(stage)), (stage, step)
        assert set(acts["stage"]) == {0, 1}
        assert acts["step"].nunique() >= 2
        measures = analyse(job)
        assert measures is not None
        step = measures.steps[0]
        (pipeline,), (bubbles,) = step.pipelines, step.bubbles
        assert pipeline.schedule.num_microbatches == NUM_MICRO_BATCHES
        ideal = 1 / (NUM_MICRO_BATCHES + 1)  # of 1F1B in two stages
        assert bubbles.ideal_even == pytest.approx(ideal)
        if "deepspeed" in run.path.name:
            assert read_out(run).count("layers 6") == read_out(run).count("layers 2") == 1
        said = vjob("report", str(run.path), "--text").stdout
        for words in (f"traced steps: {STEPS}\n", "\nPIPELINE\n", "\nSTAGES\n", "20.0 %"):
            assert words in said, said
        assert json.loads(vjob("status", str(run.path), "--json").stdout)["progress"]

"""On the real Slurm of the lab: a run takes idle nodes by itself."""

from __future__ import annotations

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_morph import CONF
from tests.cluster.test_morph import vjob as vjob
from tests.command import Vjob, wait_for
from tests.small_training import list_morphs, read_losses
from varuna_core.records.morphing import read_joins
from varuna_core.records.record import read_events
from varuna_core.records.training import read_training

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

GROWS = (
    CONF.replace("steps: 60", "steps: 2000000")
    .replace("pipeline: 4", "pipeline: 1")
    .replace("walltime_min: 10", "walltime_min: 60")
    .replace("count: 4, queue: gpu2", "count: 1, queue: gpu1")
    .replace("min_nodes: 2", "min_nodes: 1, max_nodes: 6, grow: auto, look_s: 1")
)
"""One of the two nodes of its queue; four micro-batches, so that two halve a step."""


@pytest.mark.long
def test_an_idle_node_joins_once_nobody_else_has_it(clean_lab: Lab, vjob: Vjob) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    wrap = ["sbatch", "--parsable", "--partition=gpu1", "--exclusive", "--wrap=sleep 1000"]
    other = clean_lab.run([*wrap, "--output=/dev/null"]).stdout.strip()
    run = vjob.submit(GROWS)
    log = run.scheduler_log()
    wait_for(log.exists, 60, lambda: vjob.explain(run))
    wait_for(lambda: "tend: no idle nodes fit" in log.read_text(), 180, lambda: vjob.explain(run))
    assert read_joins(run.morph) == [], "gpu2 is idle, and is none of its queues"
    clean_lab.run(["scancel", other])
    wait_for(lambda: len(list_morphs(run)) == 1, 180, lambda: vjob.explain(run))
    (join,) = read_joins(run.morph)
    assert join.by_itself and (join.group.count, join.group.queue) == (1, "gpu1")
    (asked,) = [event for event in read_events(run) if event["kind"] == "grow-asked"]
    assert asked["why"].startswith("1 more node: about ") and "(a guess)" in asked["why"]
    more = list_morphs(run)[0]["iteration"] + 10
    wait_for(lambda: max(read_losses(run)) >= more, 120, lambda: vjob.explain(run))
    assert "saved and left" in vjob("cancel", run.name).stdout
    assert vjob.wait_over(run, 90)["verdict"] == "CANCELLED", vjob.explain(run)
    assert [morph["to"] for morph in list_morphs(run)] == ["1 x 2"]
    found = read_losses(run)
    losses, _ = train_plainly(read_training(run.training), last=max(found))
    assert found == pytest.approx(losses, rel=2e-5)
    wait_for(lambda: not clean_lab.run(["squeue", "--noheader"]).stdout.strip(), 60)

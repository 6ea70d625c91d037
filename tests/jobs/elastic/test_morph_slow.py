"""A run on this machine in which one node is slow, and another one has nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from tests.jobs.elastic.test_morph import CONF
from tests.jobs.elastic.test_morph import vjob as vjob
from tests.small_training import list_morphs, read_losses, write_slow_steps
from varuna_core.records.record import read_events
from varuna_core.records.training import read_training

pytestmark = pytest.mark.slow

SLOW_S = 0.05
"""Four times in each micro-batch: 0.6 s of a step more, whatever else the processors have to do."""


@pytest.mark.long
def test_a_slow_node_is_left_out_where_another_one_waits(vjob: Vjob, tmp_path: Path) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    write_slow_steps(tmp_path / "slow", SLOW_S)
    groups = "{{group: one}}, {{group: slow, env: {{PYTHONPATH: %s}}}}, {{group: spare}}"
    text = CONF.replace("{{group: all, count: 4, ranks: 1}}", groups % (tmp_path / "slow"))
    text = text.replace("pipeline: 4", "pipeline: 1, data: 2").replace(
        "walltime_min: 5", "walltime_min: 600"
    )
    text = text.replace("min_nodes: {min_nodes}", "min_nodes: 2, leave_slow: true, look_s: 1")
    run = vjob.submit(text.format(steps=20000))
    try:
        wait_for(lambda: len(list_morphs(run)) == 1, 240, lambda: vjob.explain(run))
        (morph,) = list_morphs(run)
        assert (morph["from"], morph["to"], morph["nodes"]) == ("1 x 2", "1 x 2", [0, 2])
        assert morph["reason"].startswith("node 1 is left out: rank 1 works ")
        told = [event for event in read_events(run) if event["kind"] == "left-out"]
        assert [event["reason"] for event in told] == [morph["reason"]]
        assert morph["reason"] in vjob("status", run.name, "--once", code=None).stdout
        wait_for(lambda: max(read_losses(run)) > morph["iteration"] + 5, 120)
        found = read_losses(run)
        losses, _ = train_plainly(read_training(run.training), last=max(found))
        assert found == pytest.approx(losses, rel=2e-5)
    finally:
        vjob("cancel", run.name, "--now", code=None)
        vjob.wait_over(run, 60)

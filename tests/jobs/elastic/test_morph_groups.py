"""Runs of two groups of nodes that lose one of them, on this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.command import Vjob
from tests.jobs.elastic.test_morph import CONF, STEPS, WARM, kill_node, wait_for_checkpoint
from tests.jobs.elastic.test_morph import vjob as vjob
from tests.small_training import list_morphs, read_losses
from varuna_core.records.files import read_json
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import read_events
from varuna_core.records.training import read_training

pytestmark = pytest.mark.slow


def text_of(hetero: str, of: str = CONF) -> str:
    """Three stages: one on the node of the first group, two on that of the second."""
    text = of.replace("pipeline: 4", "pipeline: 3").replace(
        "[{{group: all, count: 4, ranks: 1}}]",
        "[{{group: master, ranks: 1}}, {{group: slave, ranks: 2}}]",
    )
    text = text.replace("  scheduler", f"  hetero: {hetero}\n  scheduler")
    return text.format(steps=STEPS, min_nodes=1)


@pytest.fixture(autouse=True)
def nothing_is_left(vjob: Vjob) -> Iterator[None]:
    yield
    vjob("cancel", "last", "--now", code=None)


@pytest.mark.parametrize("hetero", ["hetjob", "split"])
@pytest.mark.long
def test_a_run_goes_on_without_its_second_group(vjob: Vjob, hetero: str) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    run = vjob.submit(text_of(hetero, WARM if hetero == "split" else CONF))
    wait_for_checkpoint(vjob, run, 10)
    if hetero == "split":
        os.kill(read_json(run.path / "local.slave.json")["pid"], signal.SIGTERM)
    else:
        kill_node(run, 1)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    (morph,) = list_morphs(run)
    assert (morph["from"], morph["to"], morph["nodes"]) == ("3 x 1", "1 x 1", [0])
    plan = read_attempt_plan(run, 1)
    assert plan is not None and [group.name for group in plan.groups] == ["master"]
    losses, _ = train_plainly(read_training(run.training))
    assert read_losses(run) == pytest.approx(losses, rel=2e-5)


@pytest.mark.long
def test_both_halves_of_a_split_run_come_back_together(vjob: Vjob) -> None:
    text = text_of("split").replace("join_s: 30", "join_s: 30\n  requeue: true")
    run = vjob.submit(text)
    wait_for_checkpoint(vjob, run, 10)
    os.kill(read_json(run.path / "local.master.json")["pid"], signal.SIGUSR1)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    again = [event.get("job_id") for event in read_events(run) if event["kind"] == "requeued"]
    assert again == [None, "L2"], "the run once, and the job of its second group, by its script"
    restarts = [read_json(path)["restarts"] for path in sorted(run.path.glob("local*.json"))]
    assert restarts == [1, 1], json.dumps(restarts)
    plan = read_attempt_plan(run, 1)
    assert plan is not None and (plan.pipeline, plan.num_nodes) == (3, 2)
    assert sorted(read_losses(run)) == list(range(1, STEPS + 1))

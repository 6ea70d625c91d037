"""A run on this machine that gains nodes and gives some back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Vjob, wait_for
from tests.jobs.elastic.test_morph import CONF, WARM, names_run, read_presence, wait_for_checkpoint
from tests.jobs.elastic.test_morph import vjob as vjob
from tests.small_training import list_morphs, read_losses
from varuna_core.records.files import read_json
from varuna_core.records.morphing import read_joins
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

pytestmark = pytest.mark.slow

LONG = 20000
"""Steps of a run that is ended before them."""


def text_of(*, nodes: int, most: int, fewest: int = 1, of: str = CONF) -> str:
    """A pipeline as deep as there are nodes, and no deeper with more."""
    text = of.replace("count: 4", f"count: {nodes}").replace("pipeline: 4", f"pipeline: {nodes}")
    text = text.replace("{min_nodes}", f"{{min_nodes}}, max_nodes: {most}")
    return text.format(steps=LONG, min_nodes=fewest)


def grow(vjob: Vjob, run: RunFolder, count: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(
        vjob("grow", run.name, "--count", str(count), "--json").stdout
    )
    return said


def wait_for_morphs(vjob: Vjob, run: RunFolder, number: int) -> None:
    wait_for(lambda: len(list_morphs(run)) >= number, 120, lambda: vjob.explain(run))


@pytest.fixture(autouse=True)
def nothing_is_left(vjob: Vjob) -> Iterator[None]:
    yield
    vjob("cancel", "last", "--now", code=None)


def end_well(vjob: Vjob, run: RunFolder) -> None:
    wait_for_checkpoint(vjob, run, list_morphs(run)[-1]["iteration"] + 10)
    assert "saved and left" in vjob("cancel", run.name).stdout
    assert vjob.wait_over(run, 60)["verdict"] == "CANCELLED", vjob.explain(run)


@pytest.mark.long
def test_a_node_joins_and_leaves_again_and_the_loss_stays_the_same(vjob: Vjob) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    run = vjob.submit(text_of(nodes=2, most=4, of=WARM))
    wait_for_checkpoint(vjob, run, 10)
    said = grow(vjob, run, 2)
    assert (said["group"], said["count"]) == ("join1", 2)
    wait_for_morphs(vjob, run, 1)
    status = vjob.status(run.name)
    assert {"local2", "local3"} <= {node["name"] for node in status["nodes"]}
    text = vjob("status", run.name, "--once", code=None).stdout
    assert f"joined by job {said['job']}  RUNNING  local[2-3]" in text
    assert vjob("grow", run.name, "--count", "1", code=2).stderr.startswith(
        "vjob: 4 nodes and 1 more exceed morph.max_nodes, 4"
    )
    assert "local2, local3: asked to leave" in vjob("shrink", run.name, "--count", "2").stdout
    wait_for_morphs(vjob, run, 2)
    end_well(vjob, run)
    first, second = list_morphs(run)
    assert (first["from"], first["to"], first["nodes"]) == ("2 x 1", "2 x 2", [0, 1, 2, 3])
    assert first["reason"] == "2 more nodes are here" and first["iteration"] >= 10
    assert (second["from"], second["to"], second["nodes"]) == ("2 x 2", "2 x 1", [0, 1])
    plan = read_attempt_plan(run, 2)
    asked = read_attempt_plan(run, 0)
    assert plan is not None and asked is not None and plan.groups == asked.groups
    found = read_losses(run)
    losses, _ = train_plainly(read_training(run.training), last=max(found))
    assert found == pytest.approx(losses, rel=2e-5)
    wait_for(lambda: read_json(run.path / "local.join1.json")["state"] == "COMPLETED", 30)
    assert "is over: CANCELLED; submit its conf again" in (
        vjob("grow", run.name, "--count", "1", code=2).stderr
    )


@pytest.mark.long
def test_a_joined_job_that_is_killed_is_just_lost_nodes(vjob: Vjob) -> None:
    run = vjob.submit(text_of(nodes=1, most=2))
    wait_for_checkpoint(vjob, run, 10)
    grow(vjob, run, 1)
    wait_for_morphs(vjob, run, 1)
    subprocess.run(["kill", str(read_json(run.path / "local.join1.json")["pid"])], check=True)
    wait_for_morphs(vjob, run, 2)
    end_well(vjob, run)
    assert [morph["to"] for morph in list_morphs(run)] == ["1 x 2", "1 x 1"]
    found = read_losses(run)
    assert sorted(found) == list(range(1, max(found) + 1))


@pytest.mark.long
def test_two_who_grow_at_once_get_seats_of_their_own_and_cancel_ends_all(vjob: Vjob) -> None:
    run = vjob.submit(text_of(nodes=1, most=3))
    wait_for_checkpoint(vjob, run, 10)
    both = [vjob.start("grow", run.name, "--count", "1") for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert sorted(seat for join in read_joins(run.morph) for seat in join.seats) == [1, 2]
    wait_for(lambda: {1, 2} <= {m for e in list_morphs(run) for m in e["nodes"]}, 120)
    vjob("cancel", run.name, "--now")
    vjob.wait_over(run, 60)

    def is_empty() -> bool:
        return not [p for p in Path("/proc").glob("[0-9]*/cmdline") if names_run(p, run)]

    wait_for(is_empty, 60, lambda: vjob.explain(run))
    assert read_presence(run, 2)["host"] == "local2"
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("grow-asked") == 2


def test_what_cannot_be_is_refused_in_words(vjob: Vjob) -> None:
    run = vjob.submit(text_of(nodes=2, most=3, fewest=2))
    wait_for_checkpoint(vjob, run, 10)
    assert "at most 1 may join" in vjob("grow", run.name, "--count", "2", code=2).stderr
    assert "must be at least 1" in vjob("grow", run.name, "--count", "0", code=2).stderr
    said = vjob("shrink", run.name, "--count", "1", code=2).stderr
    assert "2 nodes without 1 are 1, fewer than morph.min_nodes, 2" in said
    said = vjob("shrink", run.name, "--node", "nobody", code=2).stderr
    assert "not among the nodes of" in said and "local0, local1" in said
    assert "give either" in vjob("shrink", run.name, code=2).stderr
    assert read_joins(run.morph) == []
    vjob("cancel", run.name, "--now")
    vjob.wait_over(run, 60)

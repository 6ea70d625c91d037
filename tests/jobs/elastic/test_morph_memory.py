"""A run that loses a node and cannot read its checkpoints goes on from its nodes' memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Vjob, read_rank, wait_for
from tests.jobs.elastic.test_morph import CONF, kill_node
from tests.jobs.elastic.test_morph import vjob as vjob
from tests.small_training import read_losses
from varuna_core.morph.memory import LOCK
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.layout import decode_stage_map
from varuna_core.records.memory_copies import find_whole, list_held
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

pytestmark = pytest.mark.slow
STEPS = 80


@pytest.fixture
def run(vjob: Vjob) -> Iterator[RunFolder]:
    """Two stages of two replicas, on four nodes, with copies each 5 steps; it goes on from the one
    checkpoint of a run on one node that was cancelled."""
    text = CONF.format(steps=STEPS, min_nodes=1).replace("every: 10", "every: 0")
    one = text.replace("count: 4", "count: 1").replace("pipeline: 4", "pipeline: 1")
    run = vjob.submit(one)
    wait_for(lambda: max(read_steps(run, 0), default=0) > 10, 120, lambda: vjob.explain(run))
    vjob("cancel", "last")
    text = text.replace("pipeline: 4", "pipeline: 2").replace("min_nodes: 1", "min_nodes: 2")
    yield vjob.submit(text.replace("keep: 2", "keep: 2, memory_every: 5"))
    vjob("cancel", "last", "--now", code=None)


def wait_for_copy(vjob: Vjob, run: RunFolder) -> None:
    """Until the nodes' memory holds one that is whole."""
    begun = find_begun(vjob)

    def is_there() -> bool:
        homes = [path for path in find_homes(run) if not path.name.endswith(LOCK)]
        whole = find_whole({path.name: list_held(path) for path in homes})
        return whole is not None and whole.iteration > begun + 10

    wait_for(is_there, 120, lambda: vjob.explain(run))


def find_homes(run: RunFolder) -> Iterator[Path]:
    return Path(f"/dev/shm/vjob-{os.getuid()}").glob(f"{run.path.name}.*")


def find_begun(vjob: Vjob) -> int:
    """The iteration of the one checkpoint."""
    (found,) = list_complete(vjob.folder / "ckpt")
    return found.iteration


def wait_for_step(vjob: Vjob, run: RunFolder, attempt: int) -> None:
    wait_for(lambda: read_steps(run, attempt), 120, lambda: vjob.explain(run))


def read_steps(run: RunFolder, attempt: int) -> list[int]:
    texts = [path.read_text() for path in run.attempt(attempt).path.glob("*.out")]
    return [int(n) for text in texts for n in re.findall(r" iteration +(\d+)/.*? lm loss", text)]


def read_resumed(run: RunFolder, attempt: int) -> tuple[int, str]:
    found = re.search(r"resumed from iteration (\d+) in (.*)", read_rank(run, 0, attempt=attempt))
    assert found is not None
    return int(found[1]), found[2]


def list_memory_events(run: RunFolder) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == "from-memory"]


def expect_undisturbed(run: RunFolder, begun: int) -> None:
    from tests.varuna_core.programs.reference_training import train_plainly

    losses, _ = train_plainly(read_training(run.training))
    after = {step: loss for step, loss in losses.items() if step > begun}
    assert read_losses(run) == pytest.approx(after, rel=2e-5)


def test_without_a_store_it_goes_on_from_what_the_other_nodes_hold(
    vjob: Vjob, run: RunFolder, tmp_path: Path
) -> None:
    begun = find_begun(vjob)
    wait_for_copy(vjob, run)
    store, away = tmp_path / "ckpt", tmp_path / "away"
    store.rename(away)
    store.write_text("no folder")
    kill_node(run, 3)
    wait_for_step(vjob, run, 1)
    store.unlink()
    away.rename(store)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0, 1]
    iteration, where = read_resumed(run, 1)
    last = max(read_steps(run, 0))
    assert where == "the memory of the nodes"
    assert iteration % 5 == 0 and last - 10 <= iteration <= last
    (told,) = list_memory_events(run)
    assert (told["attempt"], told["iteration"]) == (1, iteration)
    assert 3 not in told["nodes"]
    expect_undisturbed(run, begun)
    assert list_complete(store)[-1].iteration == STEPS
    left = [path for path in find_homes(run) if not path.name.endswith(LOCK)]
    assert len(left) <= 1  # of the node that was killed; the next `stay` here removes it


@pytest.mark.long
def test_without_both_replicas_of_a_stage_it_goes_on_from_the_store(
    vjob: Vjob, run: RunFolder
) -> None:
    begun = find_begun(vjob)
    wait_for_copy(vjob, run)
    plan = read_attempt_plan(run, 0)
    assert plan is not None and (plan.pipeline, plan.data) == (2, 2)
    for rank in decode_stage_map(plan.stage_map)[1]:
        kill_node(run, plan.node_of_rank(rank).index)
    record = vjob.wait_over(run, 240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    attempt = run.attempts()[-1].number
    assert read_resumed(run, attempt)[0] == begun
    assert not list_memory_events(run)
    expect_undisturbed(run, begun)

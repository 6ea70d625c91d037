"""`vjob stacks` on the real Slurm of the lab: a step beside the job's own asks every node."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_jobs import conf
from tests.command import Vjob, read_out, wait_for
from varuna_core.records.files import read_json
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.slurm

PAIR = '    - {group: pair, count: 2, queue: gpu2, ranks: 2, gpus: "a10:4", memory_gb: 0}'
"""The job has all that the nodes have: the second step must not wait for any of it."""


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


def submit_hanging(vjob: Vjob, odd: int, layout: str, nodes: str | None = None) -> RunFolder:
    """A run whose rank `odd` sleeps elsewhere, once every node's beats tell of its ranks."""
    run = vjob.submit(conf("stray_rank.py", [str(odd)], layout=layout, nodes=nodes))
    plan = read_plan(run.plan)
    assert plan is not None
    wait_for(lambda: read_out(run).count("ready") == plan.world, 90, lambda: vjob.explain(run))
    wait_for(lambda: len(read_beats(run, plan.num_nodes)) == plan.num_nodes, 30)
    return run


def read_beats(run: RunFolder, num_nodes: int) -> list[dict[str, Any]]:
    """Nodes whose heartbeats name ranks."""
    beats = [read_json(run.attempt(0).beat(index)) for index in range(num_nodes)]
    return [beat for beat in beats if beat and beat.get("ranks")]


def look(vjob: Vjob, run: RunFolder, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(vjob("stacks", str(run.path), "--json", *words).stdout)
    return found


@pytest.mark.parametrize(
    ("layout", "nodes", "world"), [("single", PAIR, 4), ("hetjob", None, 16), ("split", None, 16)]
)
def test_the_odd_rank_comes_first_and_its_node_is_named(
    vjob: Vjob, layout: str, nodes: str | None, world: int
) -> None:
    run = submit_hanging(vjob, world - 1, layout, nodes)
    found = look(vjob, run)
    rest = list(range(world - 1))
    assert [group["ranks"] for group in found["groups"]] == [[world - 1], rest], found
    assert found["groups"][0]["nodes"] == ["b2" if layout == "single" else "a2"]
    assert (found["failed"], found["silent_nodes"]) == ([], {})
    frame = found["groups"][0]["stacks"][0]["threads"][0]["frames"][0]
    assert frame["function"] == "load_data"


@pytest.mark.parametrize(
    ("layout", "nodes", "last"),
    [("single", PAIR, ("b2", "1")), ("hetjob", None, ("a2", "5")), ("split", None, ("a2", "5"))],
)
def test_a_shell_is_a_step_on_the_node_that_was_named(
    vjob: Vjob, layout: str, nodes: str | None, last: tuple[str, str]
) -> None:
    run = submit_hanging(vjob, 1, layout, nodes)
    words = ("--", "sh", "-c", 'echo "$VJOB_NODE ${RANK-none}"; exit 7')
    for node, name in (("b1", "b1"), (last[0], last[0]), last):
        done = vjob("shell", str(run.path), "--node", name, *words, code=7)
        assert done.stdout == f"{node} none\n"


def test_a_node_without_power_is_named_and_the_others_are_shown(vjob: Vjob, clean_lab: Lab) -> None:
    run = submit_hanging(vjob, 1, "single", PAIR)
    stopped = read_beats(run, 2)[0]["ranks"]["0"]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    assert [group["ranks"] for group in look(vjob, run)["groups"]] == [[0], [1], [2, 3]]
    clean_lab.crash_node("b2")
    found = look(vjob, run, "--wait", "20")
    assert [group["ranks"] for group in found["groups"]] == [[0], [1]], found
    assert list(found["silent_nodes"]) == ["b2"]

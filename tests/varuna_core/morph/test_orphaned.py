"""Nodes whose manager is gone for good: on Slurm, when the batch script's node was taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import wait_until
from tests.varuna_core.morph.test_manager import HANGS_AT_FIRST, TRAINS, Elastic
from varuna_core.morph import headless
from varuna_core.morph.headless import TRIES, build_lines, give_back
from varuna_core.records.morphing import claim_epoch
from varuna_core.records.plan import read_plan, write_plan
from varuna_core.records.runfolder import MorphFolder


@pytest.fixture
def folder(tmp_path: Path) -> MorphFolder:
    found = MorphFolder(tmp_path / "morph")
    found.make()
    claim_epoch(found, "7.0")
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the scheduler was asked; it does not hear."""
    found: list[str] = []

    def note(line: str) -> bool:
        found.append(line)
        return False

    monkeypatch.setattr(headless, "run_line", note)
    return found


LINES = build_lines("requeue 7", "cancel 7")


def give(folder: MorphFolder, rest: Callable[[float], bool] = lambda seconds: True) -> bool:
    return give_back(folder, "7.0", LINES, rest, 5.0)


def test_one_node_asks_and_the_others_wait_for_their_end(
    folder: MorphFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them asked at once, and again each half minute."""
    asked: list[str] = []

    def hear(line: str) -> bool:
        asked.append(line)
        return True

    monkeypatch.setattr(headless, "run_line", hear)
    assert give(folder)
    assert asked == ["requeue 7"]
    assert not give(folder) and asked == ["requeue 7"]


def test_who_is_ended_while_it_waits_asks_nothing(folder: MorphFolder, asked: list[str]) -> None:
    assert not give(folder, rest=lambda seconds: False) and asked == []


def test_a_node_of_a_job_that_runs_again_asks_nothing(
    folder: MorphFolder, asked: list[str]
) -> None:
    """It was cut off; the job has been requeued by others, or by Slurm itself. It used to requeue
    the run of the new session."""
    claim_epoch(folder, "7.1")
    assert not give(folder) and asked == []


def test_the_run_may_go_on_elsewhere_while_the_turn_is_taken(
    folder: MorphFolder, asked: list[str]
) -> None:
    def rest(seconds: float) -> bool:
        if seconds == headless.TURN_S:
            claim_epoch(folder, "7.1")
        return True

    assert not give(folder, rest) and asked == ["requeue 7"]


def test_a_job_that_nobody_takes_back_is_ended(folder: MorphFolder, asked: list[str]) -> None:
    """It held its nodes to the time limit."""
    assert not give(folder)
    assert asked == ["requeue 7"] * TRIES + ["cancel 7"]
    assert not give(folder), "a second node finds all turns taken"
    assert asked == ["requeue 7"] * TRIES + ["cancel 7"]


def test_the_next_node_asks_where_the_first_one_died_over_it(
    folder: MorphFolder, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.turn(0, 0).write_text("{}")
    waited: list[float] = []

    def rest(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) < 4

    assert not give(folder, rest) and asked == ["requeue 7"]
    first, turn, second, _ = waited
    assert first != second and max(first, second) <= 5.0 and turn == headless.TURN_S


@pytest.mark.slow
def test_nodes_give_the_job_back(tmp_path: Path) -> None:
    """They waited for orders until the time limit, and held their job's nodes."""
    elastic = Elastic(tmp_path, HANGS_AT_FIRST + TRAINS)
    plan = read_plan(elastic.run.plan)
    assert plan is not None and plan.morphing is not None
    return_s = 5.0
    limits = replace(plan.morphing, return_s=return_s)
    write_plan(elastic.run.plan, replace(plan, morphing=limits))
    try:
        manager = elastic.start("manage")
        given = [tmp_path / f"given back {index}" for index in range(3)]
        nodes = [
            elastic.start("stay", "--node", str(i), "--orphaned", f"touch '{given[i]}'", node=i)
            for i in range(3)
        ]
        wait_until(lambda: elastic.has_started(0), "the first attempt")
        manager.kill()
        for node in nodes:
            _, err = node.communicate(timeout=120 + return_s)[:2]
            assert "gave no sign of life for 11 s: the run has no manager" in err
        assert sum(path.exists() for path in given) == 1
    finally:
        elastic.end()

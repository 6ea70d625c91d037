"""What the event of a morph says, from files as the ranks leave them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.morph import cost
from varuna_core.morph.cost import Cost
from varuna_core.morph.node_observer import NodeObserver
from varuna_core.records.exits import NodeExits, rank_exit
from varuna_core.records.files import write_json
from varuna_core.records.logs.training_log import BEGIN, format_first_step
from varuna_core.records.morphing import GATHERING, JUDGING, RUNNING, SAVING, STOPPING, ManagerState
from varuna_core.records.plan import write_plan
from varuna_core.records.record import MORPH_PARTS, read_events, read_morph_parts, read_pause_s
from varuna_core.records.runfolder import RunFolder


class Story:
    """A run of two ranks, and its states one after the other."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder)
        write_plan(self.run.plan, make_plan(make_group("all", 2, 1)))
        self.cost = Cost(self.run, NodeObserver(90, 1, 0.25))
        self.state = ManagerState(phase=GATHERING, attempt=-1)

    def go(self, phase: str, **changes: Any) -> None:
        before = self.state
        self.state = replace(before, phase=phase, **changes)
        self.cost.mark(before, self.state)

    def start(self) -> None:
        number = self.state.attempt + 1
        self.run.attempt(number).make()
        self.go(RUNNING, attempt=number, members=("0/a", "1/b"), nodes=("0/a", "1/b"))

    def train(self, *, begins: bool = True, steps: bool = True) -> bool:
        attempt = self.run.attempt(self.state.attempt)
        write_json(attempt.go, {})
        if begins:
            attempt.rank_log(0, "out").write_text(f"[{BEGIN}] datetime: x\n")
        if steps:
            attempt.rank_log(1, "out").write_text(f"{format_first_step(1)}\n")
        return self.cost.look(self.state)

    def morphs(self) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["kind"] == "morph"]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def end(story: Story) -> None:
    story.go(STOPPING, why="a node was lost")
    story.go(JUDGING)
    story.go(GATHERING)


def test_a_morph_has_all_its_parts_and_they_add_up(story: Story) -> None:
    story.start()
    assert story.train() and story.cost.trained == 0
    assert not story.cost.look(story.state), "told once"
    assert story.morphs() == [], "the first attempt is no morph"
    end(story)
    story.start()
    assert not story.train(begins=True, steps=False)
    assert story.morphs() == [] and story.cost.trained == 0
    assert story.train() and story.cost.trained == 1
    (event,) = story.morphs()
    assert set(read_morph_parts(event)) == set(MORPH_PARTS)
    pause_s = read_pause_s(event)
    assert pause_s == pytest.approx(sum(read_morph_parts(event).values()), abs=0.01)
    assert (event["from"], event["to"], event["attempt"]) == ("2 x 1", "2 x 1", 1)


def test_an_attempt_that_never_stepped_has_the_parts_that_it_had(story: Story) -> None:
    story.start()
    story.train()
    end(story)
    story.start()
    story.train(begins=False, steps=False)
    end(story)
    (event,) = story.morphs()
    assert set(read_morph_parts(event)) == {"notice_s", "stop_s", "plan_s", "start_s"}
    assert read_pause_s(event) is None
    story.start()
    assert story.train() and len(story.morphs()) == 2


@pytest.mark.parametrize(("age_s", "notice_s"), [(50, 50), (5000, 100)])
def test_the_notice_counts_from_the_first_rank_that_failed(
    story: Story, monkeypatch: pytest.MonkeyPatch, age_s: int, notice_s: int
) -> None:
    """But not from before its attempt: a node's clock may be wrong."""
    story.start()
    story.train()
    attempt = story.run.attempt(0)
    later = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 100)
    monkeypatch.setattr(cost, "time", later)
    told = {"stopped": True, "started": 0.0, "ended": time.time() - 500, "error": ""}
    NodeExits(attempt, 0, 1).write(rank_exit(0, "n0", 143, **told))  # type: ignore[arg-type]
    failed = {"stopped": False, "started": 0.0, "ended": time.time() - age_s, "error": "x"}
    NodeExits(attempt, 1, 1).write(rank_exit(1, "n1", 1, **failed))  # type: ignore[arg-type]
    end(story)
    story.start()
    story.train()
    (event,) = story.morphs()
    assert event["notice_s"] == pytest.approx(notice_s, abs=5)


def test_ranks_that_all_ended_by_themselves_have_the_reason_that_their_files_told(
    story: Story,
) -> None:
    story.start()
    story.train()
    story.go(JUDGING)
    story.go(GATHERING, why="rank 0 exited 1: ValueError")
    story.start()
    story.train()
    assert story.morphs()[0]["reason"] == "rank 0 exited 1: ValueError"


def test_who_was_asked_to_leave_was_noticed_at_once(story: Story) -> None:
    story.start()
    story.train()
    story.go(SAVING, why="1/b is to leave")
    story.go(JUDGING)
    story.go(GATHERING)
    story.start()
    story.train()
    assert story.morphs()[0]["notice_s"] == 0.0

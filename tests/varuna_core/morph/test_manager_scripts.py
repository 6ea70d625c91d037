"""Manager and nodes as real processes, with ranks of a user's own: no training.json, no Varuna."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import read_rank
from tests.varuna_core.agent.local_run import wait_until
from tests.varuna_core.morph.test_manager import Elastic
from varuna_core.records.exits import read_outcome
from varuna_core.records.files import read_json, write_json
from varuna_core.records.plan import read_attempt_plan, read_plan, write_plan
from varuna_core.records.record import read_events
from varuna_core.records.training import TrainingFacts

FACTS = TrainingFacts(
    program="script",
    layers=None,
    micro_batches=None,
    schedule="auto",
    steps=None,
    checkpoint_folder=None,
    layout="world",
)
BEGIN = """
import os, signal, sys, time
attempt, world = int(os.environ["VJOB_ATTEMPT"]), os.environ["WORLD_SIZE"]
def say(step):
    print(f"step {step}/100 loss 1.5", flush=True)
"""


class Scripted(Elastic):
    """Three ranks that run lines of Python."""

    def __init__(
        self, folder: Path, code: str, facts: TrainingFacts = FACTS, finish_s: float = 600.0
    ) -> None:
        super().__init__(folder, "")
        self.run.training.unlink()
        plan = read_plan(self.run.plan)
        assert plan is not None and plan.morphing is not None
        limits = replace(plan.morphing, facts=facts, finish_s=finish_s)
        command = (sys.executable, "-c", BEGIN + code)
        plan = replace(plan, pipeline=1, data=3, stage_map="0,1,2;", command=command)
        plan = replace(plan, morphing=limits)
        write_plan(self.run.plan, plan)

    def train(self, meanwhile: Callable[[], None] = lambda: None) -> tuple[str, list[int]]:
        """What the manager said, and the ranks of each attempt; all nodes are there at first."""
        try:
            manager, _ = self.start("manage"), [self.stay(index) for index in range(3)]
            wait_until(lambda: self.has_started(0), "the first attempt")
            meanwhile()
            code, _, said = self.finish(manager)
            assert code == 0, said
            plans = [read_attempt_plan(self.run, item.number) for item in self.run.attempts()]
            return said, [plan.world for plan in plans if plan is not None]
        finally:
            self.end()

    def wait_for_handlers(self) -> None:
        def has_handlers() -> bool:
            beats = [read_json(self.run.attempt(0).beat(index)) or {} for index in range(3)]
            return all(beat.get("catches_usr1") for beat in beats)

        wait_until(has_handlers, "the ranks' handlers")

    def let_go(self) -> None:
        write_json(self.run.morph.leave(2), {"node": 2})


LEAVES = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
if world == "3":
    time.sleep(1000)
say(7)
"""


def test_a_script_that_leaves_when_asked_goes_on_and_is_done_when_it_was_not(
    tmp_path: Path,
) -> None:
    run = Scripted(tmp_path, LEAVES)

    def ask() -> None:
        run.wait_for_handlers()
        run.let_go()

    _, worlds = run.train(ask)
    assert (worlds, run.answer()) == ([3, 2], "0")
    assert not run.run.attempt(1).training.exists()
    (morph,) = [event for event in read_events(run.run) if event["kind"] == "morph"]
    assert (morph["from"], morph["to"], morph["iteration"]) == ("1 x 3", "1 x 2", -1)


def test_a_script_that_was_asked_to_leave_at_its_last_step_is_done(tmp_path: Path) -> None:
    """The signal before the time limit came to one that ended by itself, and it began once more."""
    code = LEAVES.replace("sys.exit(0)", "(say(100), sys.exit(0))")
    run = Scripted(tmp_path, code, replace(FACTS, steps=100))

    def ask() -> None:
        run.wait_for_handlers()
        run.let_go()

    assert run.train(ask)[1] == [3] and run.answer() == "0"


def test_a_script_that_hears_nothing_is_ended_and_goes_on(tmp_path: Path) -> None:
    run = Scripted(tmp_path, 'say(3)\nif world == "3": time.sleep(1000)\n')
    said, worlds = run.train(run.let_go)
    assert (worlds, run.answer()) == ([3, 2], "0")
    assert "attempt 0 ends: node 2 is to leave" in said


@pytest.mark.long
def test_nodes_may_end_one_after_another_if_the_conf_lets_them(tmp_path: Path) -> None:
    for finish_s, rest_s, worlds in ((1.0, 1000, [3] * 4), (0.0, 4, [3])):
        code = f'say(3)\nif os.environ["RANK"] == "0": time.sleep({rest_s})\n'
        folder = tmp_path / str(finish_s)
        folder.mkdir()
        run = Scripted(folder, code, finish_s=finish_s)
        said, found = run.train()
        assert found == worlds, said
        is_limited = re.search(r"[12] nodes have ended, [12] go on", said) is not None
        assert is_limited == (finish_s > 0), said


def test_a_script_that_fails_at_the_same_step_again_and_again_is_ended(tmp_path: Path) -> None:
    run = Scripted(tmp_path, "say(5)\nsys.exit(9)\n")
    said, worlds = run.train()
    # A node whose rank failed first twice running is left out of the last one.
    assert (worlds[:3], len(worlds), run.answer()) == ([3] * 3, 4, "9")
    assert "no progress in 3 attempts" in said
    outcome = read_outcome(run.run.attempt(3))
    assert outcome is not None and outcome.code == 9


def test_a_script_that_comes_further_each_time_goes_on(tmp_path: Path) -> None:
    run = Scripted(tmp_path, "say(5 * attempt)\nsys.exit(9 if attempt < 5 else 0)\n")
    _, worlds = run.train()
    assert (worlds, run.answer()) == ([3] * 6, "0")


def test_checkpoints_of_varuna_are_the_progress_where_there_are_some(tmp_path: Path) -> None:
    """Steps that were printed and are in no checkpoint are none."""
    store = tmp_path / "ckpt"
    code = f"""
folder = {str(store)!r} + "/varuna_ckpt_6"
os.makedirs(folder, exist_ok=True)
part = folder + f"/{{os.getpid()}}.part"
open(part, "w").write("{{}}")
os.replace(part, folder + "/manifest.json")  # whole at any moment, as a checkpoint is
say(10 + attempt)
sys.exit(9)
"""
    run = Scripted(tmp_path, code, replace(FACTS, checkpoint_folder=str(store)))
    said, worlds = run.train()
    # A node whose rank failed first twice running is left out of the last one.
    assert (worlds[:3], len(worlds), run.answer()) == ([3] * 3, 4, "9")
    assert "no new checkpoint in 3 attempts" in said
    assert run.read_state().saved == 6


def test_a_run_without_facts_and_training_is_refused(tmp_path: Path) -> None:
    run = Elastic(tmp_path, "")
    run.run.training.unlink()
    code, _, said = run.finish(run.start("manage"))
    assert code != 0 and "training.json" in said


def test_the_plan_of_an_attempt_has_all_that_ranks_ask_for(tmp_path: Path) -> None:
    names = ("WORLD_SIZE", "VJOB_STAGE_MAP", "VJOB_PIPELINE", "VJOB_DATA", "VJOB_NUM_NODES")
    shown = ", ".join(f"os.environ[{name!r}]" for name in names)
    code = f"print({shown}, flush=True)\n" + LEAVES
    run = Scripted(tmp_path, code)

    def ask() -> None:
        run.wait_for_handlers()
        run.let_go()

    assert run.train(ask)[1] == [3, 2]
    for number, words in ((0, "3 0,1,2; 1 3 3"), (1, "2 0,1; 1 2 2")):
        assert read_rank(run.run, 0, attempt=number).splitlines()[0] == words

"""Which nodes an attempt takes, and what its ranks hear."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.morph.test_messages import ME
from tests.varuna_core.programs.trainings import GPT
from varuna_core.morph.attempt import make_attempt, pick_nodes
from varuna_core.morph.messages import Start
from varuna_core.records.plan import MorphPlan, Plan, read_plan
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import derive_facts, read_training, render_training

LIMITS = MorphPlan(min_nodes=1, max_nodes=6, requeue=False, save_s=5)
TRAINING = replace(GPT, pipeline=2)
FACTS = derive_facts(TRAINING)


def build_plan(first: int, second: int) -> Plan:
    """Two stages on nodes of two groups."""
    groups = [make_group("first", first, 1)]
    groups += [make_group("second", second, 1, first_node=first, first_rank=first)]
    total = first + second
    return make_plan(*groups, pipeline=2, data=total // 2, morph=True, morphing=LIMITS)


def test_the_nodes_of_an_attempt_are_the_first_that_its_layout_needs() -> None:
    assert pick_nodes(build_plan(4, 0), FACTS, ["2/k", "1/k", "0/k"]) == ("0/k", "1/k")


def test_an_attempt_knows_what_its_run_has_saved(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.morph.make()
    run.training.write_text(render_training(TRAINING))
    start = Start(1, tuple(f"{seat}/{ME.key}" for seat in range(2)))
    make_attempt(run, build_plan(2, 0), FACTS, start, saved=39)
    assert read_training(run.attempt(1).training).saved == 39


def test_a_script_hears_what_its_run_has_saved(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.morph.make()
    own = replace(FACTS, program="script")
    for attempt, saved in ((1, -1), (2, 40)):
        start = Start(attempt, tuple(f"{seat}/{ME.key}" for seat in range(2)))
        make_attempt(run, build_plan(2, 0), own, start, saved=saved)
    plans = [read_plan(run.attempt(attempt).plan) for attempt in (1, 2)]
    assert [plan and plan.env.get("VJOB_SAVED") for plan in plans] == [None, "40"]

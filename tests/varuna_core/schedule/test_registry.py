"""A schedule is one function and one row: a toy is made, verified, timed, planned and trained."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from tests.ranks.start import collect, start_ranks
from tests.ranks.train_rank import Case, write_cases
from tests.varuna_core.planner.profiles import make_profile
from tests.varuna_core.schedule.toy_rank import TOYS
from varuna_core.facts.partition import Partition
from varuna_core.morph.layout import SEVERAL_STAGES
from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.search.search import Search
from varuna_core.planner.search.space import Wishes
from varuna_core.runtime.arguments import refuse_unknown
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import (
    AUTO,
    SCHEDULES,
    ScheduleKind,
    build_schedule,
    count_stages,
    count_stages_per_rank,
    has_one_stage_a_rank,
    place_stages,
)
from varuna_core.schedule.verify import verify
from vjob.jobs.conf.schema import Parallel


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> dict[str, ScheduleKind]:
    for name, kind in TOYS.items():
        monkeypatch.setitem(SCHEDULES, name, kind)
    return TOYS


def test_the_conf_takes_the_names_of_the_registry() -> None:
    assert get_args(get_type_hints(Parallel)["schedule"]) == (*SCHEDULES, AUTO)


def test_the_manager_knows_the_schedules_with_several_stages_a_rank() -> None:
    assert tuple(name for name in SCHEDULES if not has_one_stage_a_rank(name)) == SEVERAL_STAGES


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_lie_where_the_registry_places_them(name: str) -> None:
    each = SCHEDULES[name].stages_per_rank or 3
    schedule = build_schedule(name, 4, 8, stages_per_rank=each)
    assert schedule.name == name
    assert schedule.placement == place_stages(name, 4, each)


@pytest.mark.parametrize(("name", "each"), [("toy", 1), ("toy_v", 2)])
def test_a_new_schedule_is_verified_and_timed(
    toys: dict[str, ScheduleKind], name: str, each: int
) -> None:
    refuse_unknown(name, "none", 8, 2)
    assert count_stages(name, 1) == each
    schedule = build_schedule(name, 3, 4, stages_per_rank=each)
    assert verify(schedule, capacity=1).graphs == (each,) * 3
    assert simulate(schedule, build_even_costs(3 * each)).makespan == 4 * 3 * 3 * each
    with pytest.raises(ValueError, match=f"{name} has .* a rank, not 3"):
        build_schedule(name, 3, 4, stages_per_rank=3)


def test_a_new_schedule_is_planned_where_a_conf_asks_for_it(toys: dict[str, ScheduleKind]) -> None:
    nodes = NodeKind(name="b", gpu="big", gpus=2, count=2, price_per_hour=None)
    profile = make_profile(random.Random(3), 6)

    def find_step(schedule: str) -> float:
        wishes = Wishes(schedule=schedule, stages=4)
        searched = Search(profile, TrainingModel(batch=8), Cluster(kinds=(nodes,)), wishes).run()
        assert searched.best is not None and searched.best.option.schedule == schedule
        return searched.best.step_s

    assert find_step("toy") > find_step("1f1b")


def test_a_new_schedule_trains_as_others_do(tmp_path: Path) -> None:
    cases = [
        Case(name=name, stage_map="0;1;", schedule=name, partition=partition)
        for name, partition in (("gpipe", None), ("toy", None), ("toy_v", "1-1-1-1"))
    ]
    write_cases(tmp_path, cases)
    with start_ranks("tests.varuna_core.schedule.toy_rank", 2, str(tmp_path)) as ranks:
        done = collect(ranks)
    assert [code for code, _ in done] == [0, 0], done
    for rank in range(2):
        expected, *others = (torch.load(tmp_path / f"{case.name}.{rank}.pt") for case in cases)
        for other in others:
            torch.testing.assert_close(other["losses"], expected["losses"])
            torch.testing.assert_close(other["norms"], expected["norms"])


def test_how_many_stages_a_rank_has() -> None:
    assert count_stages_per_rank(AUTO, Partition.parse("1-1-1-1"), 2) == 1
    assert count_stages_per_rank("1f1b", None, 4) == 1
    assert count_stages_per_rank("zbv", Partition.parse("1-1-1-1"), 2) == 2
    assert count_stages_per_rank("interleaved", None, 2) == 2
    assert count_stages_per_rank("interleaved", Partition.parse("1-1-1-1-1-1"), 2) == 3

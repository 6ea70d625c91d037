"""What a report takes from plan.json, whole or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vjob.reports.load.tables import PlanFacts, parse_plan_facts, read_plan_facts


def test_a_part_of_a_plan_is_shown(tmp_path: Path) -> None:
    plan = {
        "name": "young",
        "pipeline": 4,
        "partition": "2-2-2-3",
        "groups": [{"name": "a", "count": 2, "ranks": 3, "gpu_type": "a10"}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = read_plan_facts(tmp_path / "plan.json")
    assert (found.pipeline, found.partition, found.world) == (4, "2-2-2-3", 6)
    assert found.shown == (("name", "young"), ("pipeline", "4"), ("partition", "2-2-2-3"))
    assert found.groups == (("group a", "2 x 3 ranks, a10"),)


@pytest.mark.parametrize("text", ["", "[]", '{"groups": 3}', '{"groups": [{"count": "x"}]}', "nul"])
def test_a_broken_plan_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert read_plan_facts(tmp_path / "plan.json") == PlanFacts()
    assert parse_plan_facts({}) == PlanFacts()

"""What a report takes from plan.json, whole or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vjob.reports.load.sources import locate_sources
from vjob.reports.load.tables import GroupFacts, PlanFacts, parse_plan_facts, read_plan_facts


def test_a_part_of_a_plan_is_shown(tmp_path: Path) -> None:
    plan = {
        "name": "young",
        "pipeline": 4,
        "partition": "2-2-2-3",
        "groups": [{"name": "a", "count": 2, "ranks": 3, "gpu_type": "a10"}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = read_plan_facts(tmp_path / "plan.json")
    assert (found.pipeline, str(found.partition), found.world) == (4, "2-2-2-3", 6)
    assert found.shown == (("name", "young"), ("pipeline", "4"), ("partition", "2-2-2-3"))
    assert found.nodes == (GroupFacts(name="a", gpu_type="a10", count=2, ranks=3),)


@pytest.mark.parametrize("text", ["", "[]", '{"groups": 3}', '{"groups": [{"count": "x"}]}', "nul"])
def test_a_broken_plan_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert read_plan_facts(tmp_path / "plan.json") == PlanFacts()
    assert parse_plan_facts({}) == PlanFacts()


def test_what_a_batch_script_printed_is_no_log_of_a_node(tmp_path: Path) -> None:
    for name in ("n1.out", "n2.out", "scheduler.out", "scheduler.weak.out"):
        (tmp_path / name).write_text("step 1/2 loss 1.0\n")
    (attempt,) = locate_sources(tmp_path).attempts
    assert [node for node, _ in attempt.logs] == ["n1", "n2"]

"""Jobs side by side: traces and logs made by hand, so that each figure is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.analysis import analyse
from reports.compare import Compared, as_json, compare, find_differences, render_comparison
from reports.load import load_job
from tests.reports.traces import write_simulated
from varuna_core.records.training_log import Iteration, format_iteration
from varuna_core.schedule.choice import build_schedule
from varuna_core.schedule.costs import build_even_costs

STEPS = range(1, 6)


def make_job(folder: Path, schedule: str, losses: list[float], conf: dict[str, Any]) -> Compared:
    made = build_schedule(schedule, 2, 4)
    write_simulated(folder, made, build_even_costs(2), steps=STEPS)
    lines = [
        format_iteration(Iteration(step, 9, time_ms=15.0, losses={"lm loss": loss}))
        for step, loss in enumerate(losses, start=1)
    ]
    (folder / "n0.out").write_text("".join(line + "\n" for line in lines))
    job = load_job(folder)
    return Compared(label=folder.name, job=job, analysis=analyse(job), conf=conf)


def test_figures_stand_side_by_side(tmp_path: Path) -> None:
    """1F1B of 2 stages and 4 micro-batches takes 15 units of 12 of work, zero bubble 13."""
    first = make_job(tmp_path / "a", "1f1b", [4.0, 3.0, 2.0], {"name": "a", "t": {"x": 1}})
    second = make_job(tmp_path / "b", "zero_bubble", [4.0, 3.5], {"name": "a", "t": {"x": 2}})
    found = compare([first, second])
    figures = {row.name: row.values for row in found.rows}
    assert figures["steps"] == (5.0, 5.0)
    assert figures["step time, s (median)"] == pytest.approx((0.015, 0.013))
    assert figures["idle in the pipeline, %"] == pytest.approx((100 * 3 / 15, 100 * 1 / 13))
    assert figures["last loss"] == (2.0, 3.5)
    assert figures["loss at step 2"] == (3.0, 3.5)
    assert [(each.key, each.values) for each in found.differences] == [("t.x", ("1", "2"))]
    text = render_comparison(found)
    assert "0.0130 (0.87x)" in text and "t.x" in text
    assert json.loads(json.dumps(as_json(found)))["figures"]["last loss"] == [2.0, 3.5]


def test_what_one_job_lacks_is_a_dash(tmp_path: Path) -> None:
    first = make_job(tmp_path / "a" / "run", "1f1b", [4.0], {})
    bare = tmp_path / "b" / "run"
    bare.mkdir(parents=True)
    (bare / "n0.out").write_text("nothing of use\x1b[31m\n")
    job = load_job(bare)
    other = Compared(label="run", job=job, analysis=analyse(job), conf={})
    found = compare([first, other])
    assert found.labels == ("run (1)", "run (2)")
    assert dict((row.name, row.values[1]) for row in found.rows)["last loss"] is None
    assert not any(row.name.startswith("loss at step") for row in found.rows)
    assert all(
        line.endswith("-") for line in render_comparison(found).splitlines() if "step" in line
    )


confs = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text("abc.[", max_size=3), inner, max_size=3),
    ),
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), confs, max_size=4))
def test_a_conf_does_not_differ_from_itself(conf: dict[str, Any]) -> None:
    assert list(find_differences([conf, conf])) == []
    changed = {**conf, "new": 1}
    assert [each.key for each in find_differences([conf, changed])] == ["new"]

"""A real training over gloo, its trace read back: totals and bubbles are what the ranks saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import traced_rank
from tests.ranks.start import collect, start_ranks
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job


@pytest.mark.parametrize("world", [2, 4])
def test_the_report_of_a_training_agrees_with_the_training(tmp_path: Path, world: int) -> None:
    with start_ranks("tests.ranks.traced_rank", world, str(tmp_path)) as ranks:
        done = collect(ranks, 120)
    assert [code for code, _ in done] == [0] * world, done
    job = load_job(tmp_path)
    analysis = analyse(job)
    assert job.skipped == {}
    assert set(job.traces.steps["step"]) == set(range(1, traced_rank.STEPS + 1))
    for rank in range(world):
        took = json.loads((tmp_path / f"took.{rank}.json").read_text())
        own = job.traces.steps[job.traces.steps["rank"] == rank].sort_values("step")
        for (inner, outer), traced in zip(took, own["took_s"], strict=True):
            assert inner - 1e-6 <= traced <= outer + 1e-6
        assert (own["work_s"] + own["wait_s"] <= own["took_s"]).all()
        assert (own["optimizer_s"] > 0).all()
    for step in analysis.steps:
        assert not step.trouble
        assert len(step.pipelines) == (2 if world == 4 else 1)
        for pipeline, bubbles in zip(step.pipelines, step.bubbles, strict=True):
            # By hand: what was no work, of both ranks' time.
            busy = sum(ran.end - ran.ready for ran in pipeline.ran.values())
            assert bubbles.measured == pytest.approx(1 - busy / (2 * pipeline.makespan))
            # No bound by the measured one: a step's own ups and downs may suit its order.
            assert 0 < bubbles.ideal < 1
            micro = pipeline.schedule.num_microbatches
            assert micro == 16 // 2 // (world // 2)
            assert bubbles.ideal_even == pytest.approx(1 / (micro + 1))
        mean = sum(bubble.measured for bubble in step.bubbles) / len(step.bubbles)
        row = analysis.bubbles[analysis.bubbles["step"] == step.step]
        assert row["bubble_share"].item() == pytest.approx(mean, abs=1e-6)
        assert step.path[-1].what == "work"
        slowest = max(pipeline.makespan for pipeline in step.pipelines)
        assert sum(piece.seconds for piece in step.path) == pytest.approx(slowest, rel=1e-6)
    assert any("sets the pace" in finding.sentence for finding in find_all(job, analysis))

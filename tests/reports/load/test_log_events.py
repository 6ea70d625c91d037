"""Megatron's timers as events: the seed's profiled logs give what traces give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.megatron_lines import format_timers
from tests.reports.page.test_page import read, render
from tests.reports.traces import MS, write_rank
from varuna_core.records.logs.training_log import Iteration, format_iteration, format_job_info
from varuna_core.records.runfolder import RunFolder
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.page.timeline import build_lanes, build_steps


def write_seed_logs(folder: Path, *, iterations: int, per_log: int) -> Costs:
    """As the seed's profiler logs: 2 stages of 2 replicas, 4 micro-batches, in units of 10 ms."""
    schedule = build_schedule("1f1b", 2, 4)
    costs = Costs(forward=(1, 2), input_grad=(1, 2), weight_grad=(1, 2))
    timing = simulate(schedule, costs)
    text = ""
    for last in range(per_log, iterations + 1, per_log):
        calls = {}
        for rank in range(4):
            stage = rank // 2
            actions, starts = schedule.ranks[stage], timing.starts[stage]
            for name, kind in (("forward-compute", "F"), ("backward-compute", "B")):
                pairs = [
                    (10.0 * step + 0.01 * start, 10.0 * step + 0.01 * (start + cost))
                    for step in range(last - per_log, last)
                    for action, start in zip(actions, starts, strict=True)
                    for cost in [costs.by_kind[action.kind][action.stage]]
                    if action.kind == kind
                ]
                calls[name, rank] = ([p[0] for p in pairs], [p[1] for p in pairs])
        means = {
            name: {rank: 1.0 for rank in range(4)}
            for name in ("forward-compute", "backward-compute")
        }
        text += format_iteration(Iteration(last, iterations, time_ms=200.0)) + "\n"
        text += format_timers(means, calls) + "\n"
    folder.mkdir(exist_ok=True)
    (folder / "n067.out").write_text(text)
    settings = {"NODE_RANK": 1, "WORLD_SIZE": 4, "GLOBAL_BATCH_SIZE": 8, "MICRO_BATCH_SIZE": 1}
    sizes = {"TENSOR_MP_SIZE": 1, "PIPELINE_MP_SIZE": 2, "PARTITION": "1-2"}
    (folder / "n061.out").write_text(format_job_info({**settings, **sizes}) + "\n")
    return costs


def test_the_seeds_timers_give_pipelines_and_a_timeline(tmp_path: Path) -> None:
    costs = write_seed_logs(tmp_path, iterations=6, per_log=3)
    job, analysis = read(tmp_path)
    assert sorted(job.events["step"].unique()) == [1, 2, 3, 4, 5, 6]
    ideal = simulate(build_schedule("1f1b", 2, 4), costs).bubble_share
    for step in analysis.steps:
        assert [bubble.measured for bubble in step.bubbles] == pytest.approx([ideal] * 2)
    assert analysis.paces is not None
    assert analysis.paces.work_s == pytest.approx((0.12, 0.24))
    held = build_steps(job, build_lanes(job, analysis))
    assert [step.facts["events"] for step in held] == [32] * 6
    assert "Megatron&#39;s timers" in render(tmp_path)


def test_traces_without_details_leave_the_timeline_to_the_timers(tmp_path: Path) -> None:
    write_seed_logs(tmp_path, iterations=2, per_log=2)
    path = write_rank(tmp_path, 0, [("F", 1, 0, 0, 0, 0, MS, 0, "")])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("[")))
    job, analysis = read(tmp_path)
    assert len(job.traces.steps) == 1
    lanes = build_lanes(job, analysis)[""]
    assert [lane["rank"] for lane in lanes] == [0, 1, 2, 3] and lanes[0]["host"] == "n0"
    assert len(build_steps(job, build_lanes(job, analysis))) == 2
    assert "</html>" in render(tmp_path)


def test_timers_without_settings_are_one_stage(tmp_path: Path) -> None:
    write_seed_logs(tmp_path, iterations=2, per_log=2)
    (tmp_path / "n061.out").unlink()
    job, _ = read(tmp_path)
    assert set(job.events["stage"]) == {0} and set(job.events["step"]) == {2}
    assert "<html" in render(tmp_path)


def test_a_runs_plan_says_the_layout_that_its_log_does_not(tmp_path: Path) -> None:
    write_seed_logs(tmp_path / "bare", iterations=2, per_log=2)
    run = RunFolder(tmp_path / "run")
    group = {"name": "all", "count": 2, "ranks": 2}
    layout = {"pipeline": 2, "tensor": 1, "order": "pipeline", "partition": "1-2"}
    run.path.mkdir()
    run.plan.write_text(json.dumps({"groups": [group], **layout}))
    run.resolved.write_text("train: {micro_batch_size: 1, global_batch_size: 8}\n")
    run.attempt(0).path.mkdir(parents=True)
    shutil.copy(tmp_path / "bare/n067.out", run.attempt(0).path)
    job, _ = read(run.path)
    found = job.events.drop_duplicates(["rank"]).sort_values("rank")
    assert found[["stage", "replica"]].to_numpy().tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert set(job.events["attempt"]) == {"0"} and sorted(set(job.events["step"])) == [1, 2]
    assert str(job.find_partition("0")) == "1-2"

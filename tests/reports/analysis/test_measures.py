"""Stragglers, outliers, restarts, curves: each from a job made to have it."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.reports.traces import MS, ORIGIN, write_rank, write_simulated
from varuna_core.facts.known import NotKnown, Value, value_of
from varuna_core.records.formatting import format_pace
from varuna_core.records.logs.training_log import Iteration, format_iteration
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.jobs.conf.schema import JobConf
from vjob.reports.analysis.balance import compute_medians_of_others
from vjob.reports.analysis.findings import Finding, find_all
from vjob.reports.analysis.headline import measure_energy
from vjob.reports.analysis.measures import analyse
from vjob.reports.export.text import show_finding
from vjob.reports.load.tables import RunState, load_job
from vjob.reports.page.sections import build_sections

SCHEDULE = build_schedule("1f1b", 2, 4)


def report(folder: Path) -> list[Finding]:
    job = load_job(folder)
    found = find_all(job, analyse(job))
    json.dumps([show_finding(one) for one in found])
    return found


def find(findings: list[Finding], words: str) -> Finding:
    (found,) = [finding for finding in findings if words in finding.sentence]
    return found


def test_a_rank_slower_than_its_peers_is_found_and_no_other(tmp_path: Path) -> None:
    """Replica 2 of stage 1 takes 1.5 times as long: rank 1 * 3 + 2."""

    def cost(step: int, replica: int) -> Costs:
        slow = 1.5 if replica == 2 else 1.0
        return Costs(forward=(1, slow), input_grad=(1, slow), weight_grad=(1, slow))

    write_simulated(tmp_path, SCHEDULE, cost, steps=range(1, 9), replicas=3, hosts=("a", "b", "c"))
    (straggler,) = analyse(load_job(tmp_path)).stragglers
    assert (straggler.rank, straggler.stage, straggler.host) == (5, 1, "c")
    assert straggler.ratio == pytest.approx(1.5)
    assert (straggler.share_of_steps, straggler.num_peers) == (1.0, 2)
    finding = find(report(tmp_path), "Rank 5 on c takes 1.50 times")
    assert finding.key == "cluster.exclude: [c]"


def test_another_kind_of_gpu_is_no_straggler(tmp_path: Path) -> None:
    for rank, (device, work) in enumerate([("A100", 1), ("A100", 1), ("A10", 3), ("A10", 3)]):
        events = [("F", step, 0, 0, step * 9 * MS, 0, work * MS, 0, "") for step in range(1, 9)]
        write_rank(tmp_path, rank, events, replica=rank, device=device)
    assert analyse(load_job(tmp_path)).stragglers == ()


def test_a_step_that_stands_out_names_its_cause(tmp_path: Path) -> None:
    events = []
    for step in range(1, 21):
        events.append(("F", step, 0, 0, step * 1000 * MS, 0, 100 * MS + step, 0, ""))
        if step == 13:
            events.append(("checkpoint", step, 0, -1, step * 1000 * MS, 0, 700 * MS, 0, ""))
    write_rank(tmp_path, 0, events)
    (outlier,) = analyse(load_job(tmp_path)).outliers
    assert (outlier.step, outlier.rank, outlier.kind) == (13, 0, "checkpoint")
    assert outlier.took_s == pytest.approx(0.7)
    assert find(report(tmp_path), "stands out").key == "train.checkpoint.every"


def test_an_evaluation_before_a_step_is_no_work_of_the_step(tmp_path: Path) -> None:
    """Rank 1 evaluates for 700 ms and begins step 13 then; rank 0 comes 200 ms later. The step
    itself takes 500 ms more than others, and waits for most of them."""
    for rank in (0, 1):
        events, now = [], 0
        for step in range(1, 21):
            now += (step == 13) * (700 + 200 * (rank == 0)) * MS
            wait = (step == 13) * (500 + 200 * (rank == 1)) * MS
            events.append(("F", step, rank, 0, now, wait, 100 * MS + step, 0, ""))
            if step == 13:
                events.append(("evaluate", step, rank, -1, now - 700 * MS, 0, 700 * MS, 0, ""))
            now += wait + 100 * MS + step
        write_rank(tmp_path, rank, events, stage=rank)
    analysis = analyse(load_job(tmp_path))
    (outlier,) = analysis.outliers
    assert (outlier.step, outlier.took_s) == (13, pytest.approx(0.6))
    assert (outlier.rank, outlier.kind) == (None, ""), "it was no work of a rank"


def test_a_restart_costs_what_was_done_again(tmp_path: Path) -> None:
    """Steps 1 to 6, a crash, then 5 to 8: two of ten were done twice, 100 s lie between."""
    for attempt, steps, begin_s in (("0", range(1, 7), 0), ("1", range(5, 9), 106)):
        events = [
            ("F", step, 0, 0, (begin_s + at) * 1000 * MS, 0, 1000 * MS, 0, "")
            for at, step in enumerate(steps)
        ]
        write_rank(tmp_path / f"attempt-{attempt}", 0, events)
    goodput = analyse(load_job(tmp_path)).goodput
    first, second = goodput.attempts
    assert (first.first_step, first.last_step, second.first_step) == (1, 6, 5)
    assert first.repeated_s == pytest.approx(2.0)
    assert goodput.wall_s == pytest.approx(110)
    assert goodput.useful_s == pytest.approx(8)
    assert goodput.between_s == pytest.approx(100)
    assert isinstance(goodput.share, Value) and goodput.share.value == pytest.approx(8 / 110)
    found = find(report(tmp_path), "went to useful steps")
    assert found.rule == "goodput" and found.values["repeated_s"] == pytest.approx(2.0)
    assert "1 restart cost 2 s of steps done again and 100 s between" in found.sentence
    event = {"time": 1.0, "kind": "morph", "pause_s": 101.0}
    (tmp_path / "events.jsonl").write_text(json.dumps(event))
    found = find(report(tmp_path), "went to useful steps")
    assert "1 morph cost 2 s of steps done again and paused the training for 101 s" in (
        found.sentence
    ), "as vjob status says"


def test_steps_that_overlap_count_once(tmp_path: Path) -> None:
    """In turn one rank and the other has the longer step: 1.3 s and 1.2 s, of 2 s for both."""
    spans = {0: ((0, 1300), (1300, 700)), 1: ((500, 800), (1300, 1200))}
    for rank, pair in spans.items():
        events = [
            ("F", 2 * at + half, rank, 0, (2000 * at + begin) * MS, 0, took * MS, 0, "")
            for at in range(5)
            for half, (begin, took) in enumerate(pair)
        ]
        write_rank(tmp_path, rank, events, stage=rank)
    analysis = analyse(load_job(tmp_path))
    assert analysis.goodput.wall_s == pytest.approx(10.5)
    assert analysis.goodput.useful_s == pytest.approx(10.5)
    assert list(analysis.times["took_s"]) == pytest.approx([1.3, *[1.2, 0.8] * 4, 1.2])
    assert value_of(analysis.headline.step_s) == pytest.approx(1.2)


def test_ranks_that_ended_well_are_no_failed_ones(tmp_path: Path) -> None:
    """Where some rank has a signal, the others' none is still none."""
    write_rank(tmp_path / "attempt-0", 0, [("F", 1, 0, 0, 0, 0, MS, 0, "")])
    ends = (
        {"code": 0},
        {"code": 137, "signal": "SIGKILL"},
        {"code": 1},
        {"code": 1, "stopped": True},
    )
    (tmp_path / "attempt-0" / "exit").mkdir()
    for rank, end in enumerate(ends):
        base = {"rank": rank, "node": "a", "signal": None, "stopped": False, "last_error": "x"}
        path = tmp_path / "attempt-0" / "exit" / f"{rank}.json"
        path.write_text(json.dumps({**base, "started": 0.0, "ended": 1.0, **end}))
    job = load_job(tmp_path)
    (table,) = [
        table for table in build_sections(job, analyse(job)) if table.title == "failed ranks"
    ]
    assert [row[1:4] for row in table.rows] == [
        ("rank 1", "a", "signal SIGKILL"),
        ("rank 2", "a", "exit 1"),
    ]


@pytest.mark.parametrize("unknown", [(), (0,), (1,)])
def test_only_rank_0_needs_no_offset(tmp_path: Path, unknown: tuple[int, ...]) -> None:
    for attempt in (0, 1):
        for rank in (0, 1, 2):
            event = ("F", 1 + attempt, 0, 0, 0, 0, MS, 0, "")
            folder = tmp_path / f"attempt-{attempt}"
            path = write_rank(folder, rank, [event], replica=rank, host=f"n{rank}")
            if rank in unknown:
                lines = path.read_text().splitlines(keepends=True)
                path.write_text("".join([lines[0], *lines[2:]]))
    told = [finding.sentence for finding in report(tmp_path) if "not compared" in finding.sentence]
    assert bool(told) == (unknown == (1,))


def test_tries_set_aside_are_attempts_of_their_own(tmp_path: Path) -> None:
    event = ("F", 1, 0, 0, 0, 0, MS, 0, "")
    write_rank(tmp_path / "attempt-0" / "earlier-0", 0, [event])
    write_rank(tmp_path / "attempt-0", 0, [event])
    assert [item.label for item in load_job(tmp_path).sources.attempts] == ["0.earlier-0", "0"]


def test_each_try_of_an_attempt_has_its_own_start(tmp_path: Path) -> None:
    event = ("F", 1, 0, 0, 0, 0, 1000 * MS, 0, "")
    origin_s = ORIGIN / 1e9
    write_rank(tmp_path / "attempt-0" / "earlier-0", 0, [event], shift_ns=-500 * 10**9)
    write_rank(tmp_path / "attempt-0", 0, [event])
    for path in tmp_path.rglob("0.jsonl"):  # two hosts' clocks were never compared
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"offset"' not in line))
    starts = [origin_s - 510, origin_s - 10]
    lines = [json.dumps({"time": time, "kind": "started", "attempt": 0}) for time in starts]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    goodput = analyse(load_job(tmp_path)).goodput
    assert [attempt.started for attempt in goodput.attempts] == pytest.approx(starts)
    assert goodput.between_s == pytest.approx(489)


def test_what_the_log_says_of_the_training_is_told(tmp_path: Path) -> None:
    lines = [
        Iteration(10, 30, time_ms=200.0, losses={"lm loss": 9.5}, skipped=3, nan=0),
        Iteration(20, 30, time_ms=100.0, losses={"lm loss": 8.0}, skipped=0, nan=2),
        Iteration(30, 30, time_ms=100.0, losses={"lm loss": 8.25}, skipped=0, nan=0),
    ]
    (tmp_path / "n0.out").write_text("\n".join(map(format_iteration, lines)))
    findings = report(tmp_path)
    assert (
        "9.5 at first and 8.25 at last, at best 8"
        in find(findings, "where it was a number, was 9").sentence
    )
    assert find(findings, "were skipped").sentence.startswith("3 of 30 steps")
    assert findings[0].sentence == "The loss was not a number in 2 steps."
    assert analyse(load_job(tmp_path)).goodput.useful_s == pytest.approx(4.0)


def test_lines_that_print_nan_are_no_count_of_steps(tmp_path: Path) -> None:
    """Five lines about 451 steps without a loss were reported as five steps."""
    lines = [
        f"step {step} loss {(2.5, 'inf', 'nan')[step // 100 - 1]} time 20 ms"
        for step in range(100, 301, 50)
    ]
    (tmp_path / "n0.out").write_text("\n".join(lines))
    found = find(report(tmp_path), "not a number")
    assert found.sentence == (
        "The loss was not a number in at least 3 steps, first printed at step 200."
    )


def test_a_promise_of_the_plan_is_held_against_the_steps(tmp_path: Path) -> None:
    write_simulated(tmp_path / "attempt-0", SCHEDULE, build_even_costs(2), steps=range(1, 6))
    plan = {"prediction": {"step_s": 0.010}, "groups": [{"count": 1, "ranks": 3}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    findings = report(tmp_path)
    # Two stages and four micro-batches of 3 ms: 15 ms.
    assert "0.015 s; the plan predicted 0.01 s (1.50 times)" in find(findings, "predicted").sentence
    assert find(findings, "wrote no trace").sentence == "Rank 2 wrote no trace."
    for band, words in (([0.012, 0.016], "within"), ([0.009, 0.011], "outside")):
        plan["prediction"] = {"step_s": 0.010, "band_s": band}
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        said = find(report(tmp_path), "predicted").sentence
        assert f"(1.50 times, {words} the plan's range of {format_pace(band[0])} to" in said


def list_keys(kind: type, prefix: str = "") -> set[str]:
    found = set()
    for name, hint in get_type_hints(kind).items():
        if name in {field.name for field in fields(kind)}:
            found.add(prefix + name)
            for part in (hint, *getattr(hint, "__args__", ())):
                if is_dataclass(part) and isinstance(part, type):
                    found |= list_keys(part, f"{prefix}{name}.")
    return found


def test_every_key_that_a_finding_names_is_one_of_the_conf() -> None:
    folder = ROOT / "reports"
    text = (folder / "analysis" / "findings.py").read_text()
    known = list_keys(JobConf)
    named = set(re.findall(r"\b(?:train|parallel|cluster|profile|data)\.[\w.]+\w", text))
    assert len(named) > 5
    assert named <= known, named - known


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0, float("nan")]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_the_median_of_the_others_is_that(rows: list[list[float]]) -> None:
    found = compute_medians_of_others(np.array(rows))
    for row, medians in zip(rows, found, strict=True):
        for at, median in enumerate(medians):
            others = [v for other, v in enumerate(row) if other != at and v == v]
            if row[at] == row[at]:  # what is not known has no use for peers
                asked = float(np.median(others)) if others else float("nan")
                assert median == pytest.approx(asked, nan_ok=True)


def test_a_stage_that_nobody_wrote_of_keeps_its_place(tmp_path: Path) -> None:
    """Nor does a number that is none of a stage cost memory, as it once did: all of it."""
    for rank, stage in ((0, 0), (2, 2), (3, 2**40)):
        write_rank(tmp_path, rank, [("F", 1, stage, 0, 0, 0, (rank + 1) * MS, 0, "")], stage=stage)
    analysis = analyse(load_job(tmp_path))
    (step, *_), paces = analysis.steps, analysis.paces
    assert paces is not None and paces.work_s == pytest.approx((0.001, 0.0, 0.003))
    assert step.trouble == "replica 0: no rank recorded stage 1"


def make_samples(power: dict[str, list[float | None]]) -> pd.DataFrame:
    """Samples of GPUs `node:gpu`, ten seconds apart; None is a sample without power."""
    rows = [
        {"attempt": "0", "node": name[:2], "gpu": name[3:], "time": 10.0 * at, "power_w": watts}
        for name, all_watts in power.items()
        for at, watts in enumerate(all_watts)
    ]
    return pd.DataFrame(rows)


def test_energy_is_power_over_time() -> None:
    samples = make_samples({"n0:0": [360.0, 360.0, 360.0], "n1:0": [0.0, 720.0, 720.0]})
    found = measure_energy(samples, 2)
    assert isinstance(found, Value)
    assert found.value == pytest.approx((20 * 360 + 10 * 360 + 10 * 720) / 3.6e6)
    assert (found.evidence[0].seen, found.evidence[0].expected) == (40, 40)


def test_time_without_samples_has_no_energy() -> None:
    watts: list[float | None] = [360.0] * 4 + [None] * 60 + [360.0] * 4
    found = measure_energy(make_samples({"n0:0": watts}), 1)
    assert isinstance(found, Value) and found.value == pytest.approx(60 * 360 / 3.6e6)
    assert (found.evidence[0].seen, found.evidence[0].expected) == (60, 670)


@pytest.mark.parametrize(
    ("power", "num_gpus", "reason"),
    [
        ({}, 1, "no sample contains a power reading of a GPU"),
        ({"n0:0": [None, None]}, 1, "no sample contains a power reading of a GPU"),
        (
            {"n0:0": [10.0, 9.0]},
            0,
            "it is not known how many of the sampled GPUs belong to the job",
        ),
        ({"n0:0": [10.0]}, 1, "there is one sample of each GPU"),
        ({"n0:0": [10.0, 9.0], "n0:1": [10.0, 9.0]}, 1, "the samples have GPUs of other jobs too"),
    ],
)
def test_energy_is_not_known_without_all_it_needs(
    power: dict[str, list[float | None]], num_gpus: int, reason: str
) -> None:
    found = measure_energy(make_samples(power), num_gpus)
    assert isinstance(found, NotKnown) and found.reason == reason


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
def test_no_figure_rests_on_a_clock_that_was_set(tmp_path: Path, by: float) -> None:
    attempt = tmp_path / "attempt-0"
    attempt.mkdir()
    place, out, marks = 0, "", ""
    for step in range(1, 21):
        marks += f"{1.7e9 + step / 4 + (by if step > 10 else 0):.3f} {place} 0\n"
        out += f"0: step {step}/20 loss 0.5\n"
        place = len(out)
    (attempt / "a1.out").write_text(out)
    (attempt / "a1.times").write_text(marks)
    events = [{"time": 1.7e9, "kind": "started", "attempt": 0}]
    events.append({"time": 1.7e9 + 3 + by, "kind": "clock-set", "attempt": 0, "by": by})
    events.append({"time": 1.7e9 + 6 + by, "kind": "ended", "attempt": 0})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    found = analyse(load_job(tmp_path))
    headline = found.headline
    assert isinstance(headline.step_s, Value) and headline.step_s.value == pytest.approx(0.25)
    for figure in (headline.duration_s, headline.goodput):
        assert isinstance(figure, NotKnown) and "the clock was set" in figure.reason
    assert not found.outliers and found.goodput.attempts[0].ended is None
    report(tmp_path)


def test_a_run_that_left_no_end_has_no_duration(tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-0"
    attempt.mkdir()
    (attempt / "a1.out").write_text("0: step 1/20 loss 0.5\n0: step 2/20 loss 0.5\n")
    (attempt / "a1.times").write_text("1700000001.000 0 0\n1700000002.000 22 0\n")
    event = {"time": 1.7e9, "kind": "started", "attempt": 0}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    job = load_job(tmp_path)
    assert isinstance(analyse(job).headline.duration_s, Value), "it may go on"
    gone = RunState("FAILED", "the job's supervisor exited without recording an end")
    ended = replace(job, state=gone)
    for figure in (analyse(ended).headline.duration_s, analyse(ended).headline.rank_hours):
        assert isinstance(figure, NotKnown) and "no record says when the run ended" in figure.reason

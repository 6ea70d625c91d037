"""Steps that became slower: found where they did, and nowhere else; and curves beside noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.monitor.readers.test_times_of_writing import NodeLogs
from tests.reports.analysis.test_readings import BEGAN, Lines, write_counts, write_run
from vjob.reports.analysis.findings import Finding, find_all
from vjob.reports.analysis.headline import list_facts
from vjob.reports.analysis.measures import Analysis, analyse
from vjob.reports.analysis.opening import write_opening
from vjob.reports.analysis.slowdown import COLUMNS, find_slowdown
from vjob.reports.analysis.trend import measure_trend
from vjob.reports.load.tables import load_job


def build_paces(took: Sequence[float]) -> pd.DataFrame:
    end, steps = np.cumsum(took), np.arange(2, len(took) + 2)
    table = {"attempt": "0", "first": steps, "last": steps, "begin_at": end - took, "end_at": end}
    return pd.DataFrame({**table, "took_s": took, "count": 1})[COLUMNS]


@given(
    seed=st.integers(0, 2**32 - 1), num=st.integers(3, 200), noise=st.floats(0, 0.6),
    warm_up=st.integers(0, 60), every=st.integers(3, 40), long=st.floats(1, 40),
    level=st.floats(1, 20),
)  # fmt: skip
def test_steps_with_noise_a_warm_up_and_pauses_did_not_become_slower(
    seed: int, num: int, noise: float, warm_up: int, every: int, long: float, level: float
) -> None:
    """A compilation, evaluations, saves, and steps that are quicker once all data are read."""
    took = np.exp(np.random.default_rng(seed).normal(0, noise, num))
    took[every - 1 :: every] *= long
    took[:warm_up] *= level
    assert find_slowdown(build_paces(took)) is None


@given(
    seed=st.integers(0, 2**32 - 1), num=st.integers(60, 200), noise=st.floats(0, 0.06),
    at=st.floats(0.2, 0.8), ratio=st.floats(2, 20), every=st.integers(20, 40),
    lasts=st.booleans(),
)  # fmt: skip
def test_steps_that_became_slower_are_found_with_their_step(
    seed: int, num: int, noise: float, at: float, ratio: float, every: int, lasts: bool
) -> None:
    took = np.exp(np.random.default_rng(seed).normal(0, noise, num))
    took[every - 1 :: every] *= 3
    begin = int(at * num)
    end = num if lasts else min(begin + num // 4, num)
    took[begin:end] *= ratio
    found = find_slowdown(build_paces(took))
    assert found is not None and len(found.stretches) == 1
    assert abs(found.stretches[0].first - (begin + 2)) <= 2
    assert found.ratio == pytest.approx(ratio, rel=0.2)
    assert found.lasts == (end == num) and not found.is_gradual


def test_steps_that_grow_slower_and_slower_have_no_step_from_which_on() -> None:
    found = find_slowdown(build_paces(np.linspace(1, 4, 100)))
    assert found is not None and found.is_gradual and found.mean_s == pytest.approx(2.5)
    assert found.paces == "1.06 s each at first, 3.94 s at last"


def read(folder: Path, lines: Lines) -> tuple[Analysis, dict[str, Finding]]:
    if lines:
        write_run(folder, lines)
    job = load_job(folder)
    analysis = analyse(job)
    return analysis, {one.rule: one for one in find_all(job, analysis)}


def test_a_rate_is_that_of_the_mean_step_where_steps_became_slower(tmp_path: Path) -> None:
    head = "iteration {}/ 36 | elapsed time per iteration (ms): {}.0 | global batch size: 8 |"
    took = [1000 if step <= 20 else 4000 for step in range(1, 37)]
    ends = 12 + np.cumsum(took) / 1000
    times = enumerate(zip(ends, took, strict=True), 1)
    analysis, _ = read(tmp_path, [(float(at), head.format(n, ms)) for n, (at, ms) in times])
    facts = {fact.name: fact.value for fact in list_facts(analysis.headline)}
    assert facts["speed"] == "3.37 samples/s (the mean of slow and usual steps)"


SLOWED = [(12.0 + step if step <= 20 else 32.0 + 4 * (step - 20), f"step {step}/36 loss 1.0")
          for step in range(1, 37)]  # fmt: skip


def test_a_run_that_slowed_down_halfway_says_so_with_what_came_with_it(tmp_path: Path) -> None:
    """Its report had a median of 1 s, and the slow steps were time that nothing accounts for."""
    analysis, found = read(tmp_path, SLOWED)
    assert found["slower"].sentence == (
        "Steps became 4.0 times slower from step 21 (22:13:52 UTC) on, and stayed slow: 1 s "
        "each before, 4 s then; the cause is not known."
    )
    assert "no samples" in found["slower"].evidence and found["slower"].cause == "slowdown"
    assert found["slower"].lost_s == pytest.approx(48.0)
    facts = {fact.name: fact.value for fact in list_facts(analysis.headline)}
    assert facts["steps"] == "36 of 36, 1 s each before step 21, 4 s from there on"
    assert analysis.goodput.useful_s == pytest.approx(84.0) and not analysis.outliers
    opening = write_opening(load_job(tmp_path), analysis, list(found.values()))
    assert opening.endswith("the slower steps, but no key is known to help.")
    samples = [
        {"time": BEGAN + at, "gpus": [], "cpu_percent": 95.0 if at > 32 else 30.0}
        for at in range(10, 100, 5)
    ]
    text = "".join(json.dumps(one) + "\n" for one in samples)
    (tmp_path / "attempt-0/n000.gpu.jsonl").write_text(text)
    _, found = read(tmp_path, [])
    assert "; at the same time the processors of n000 were 95 % busy, up from 30 %." in (
        found["slower"].sentence
    )
    assert found["slower"].values["changes"][0]["what"] == "processors"


def test_counted_steps_with_a_pace_are_not_called_untimed(tmp_path: Path) -> None:
    """A line said that nothing tells how long a step took, beside how long one took."""
    write_run(tmp_path, [(50.0, "step 30/70 loss 1.0")])
    write_counts(tmp_path / "attempt-0", 70, 15)
    analysis, found = read(tmp_path, [])
    assert "1 s each" in {fact.name: fact.value for fact in list_facts(analysis.headline)}["steps"]
    assert "steps not known" not in found


@pytest.mark.parametrize("num", [8, 30, 300])
def test_a_curve_goes_somewhere_only_beyond_its_noise(num: int) -> None:
    noise = np.random.default_rng(num).normal(0, 0.1, num)
    assert measure_trend(list(5 + noise)).is_clear is False
    found = measure_trend(list(np.linspace(3, 1, num) + noise))
    assert found.is_clear and found.first == pytest.approx(3, abs=0.5)
    assert measure_trend([3.0, 1.0]).is_clear is None


def test_a_loss_that_falls_by_a_factor_of_ten_is_clear_though_its_fall_bends() -> None:
    """A fall in few steps was called noise, as the medians on its bend differ so much."""
    loss = [20.8, 20.6, 21.8, 18.1, 15.4, 16.8, 21.8, 19.5, 17.2, 9.6, 7.5, 5.6, 3.9, 2.0, 1.0, 1.6,
            2.4, 5.7, 4.7, 5.8, 2.6, 1.5, 0.7]  # fmt: skip
    assert measure_trend(loss).is_clear
    assert not measure_trend([3.0, 9.0, 4.0, 11.0] * 6).is_clear
    assert not measure_trend([5.0] * 12).is_clear
    loss = [9.21, 7.51, 7.22, 7.05, 7.67, 6.82, 6.84, 6.71, 7.37, 6.62, 6.61, 6.55, 7.17, 6.47,
            6.45, 6.38]  # fmt: skip
    assert measure_trend(loss).is_clear, "the first line of each epoch is higher"


def write_restarted(folder: Path, every: int = 1) -> None:
    """Attempt 0 comes to step 30, and attempt 1 goes on with step 21, to step 40; `every` n-th step
    has a line."""
    lines = [
        (12.0 + step, f"step {step}/40 loss 1.0") for step in range(1, 31) if step % every == 0
    ]
    write_run(folder, lines, code=1, ended=BEGAN + 45)
    later = folder / "attempt-1"
    (later / "exit").mkdir(parents=True)
    rank = json.loads((folder / "attempt-0/exit/0.json").read_text())
    rank |= {"started": BEGAN + 50, "ended": BEGAN + 90, "code": 0}
    (later / "exit/0.json").write_text(json.dumps(rank))
    logs = NodeLogs(later)
    for step in range(21, 41):
        if step % every:
            continue
        logs.write(BEGAN + 40 + step, f"0: step {step}/40 loss 1.0")


def test_a_resumed_run_says_from_which_step_and_what_it_did_again(tmp_path: Path) -> None:
    write_restarted(tmp_path)
    analysis, found = read(tmp_path, [])
    assert found["resumed"].sentence == (
        "Attempt 1 continued at step 21 (its first line); 40 different steps were done, "
        "and 10 steps were repeated, which is lost work."
    )
    assert found["resumed"].values["again"] == 10
    facts = {fact.name: fact.value for fact in list_facts(analysis.headline)}
    assert facts["steps"] == "40 of 40, 1 s each (the median of 46 steps)"


def test_steps_done_again_are_counted_from_the_first_that_may_have_been_done(
    tmp_path: Path,
) -> None:
    """Two findings said 12 steps, and the seconds of 10: from the first step that has a line."""
    write_restarted(tmp_path, every=3)
    analysis, found = read(tmp_path, [])
    assert "continued at about step 19 (its first line)" in found["resumed"].sentence
    assert "and about 12 steps were repeated" in found["resumed"].sentence
    first, _ = analysis.goodput.attempts
    assert first.repeated_s == pytest.approx(12)
    assert "1 restart cost about 12 s of steps done again" in found["goodput"].sentence


def test_a_run_that_begins_with_step_1_did_not_resume(tmp_path: Path) -> None:
    lines = [(12.0 + step, f"step {step}/40 loss 1.0") for step in range(10, 41, 10)]
    assert "resumed" not in read(tmp_path, lines)[1]

"""The report of a script's logs: steps by lines, bars and standard error, times by writing."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.jobs.monitor.readers.test_times_of_writing import NodeLogs
from varuna_core.facts.known import NotKnown
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.measures import Analysis, analyse
from vjob.reports.load.tables import load_job

BAR = "{percent:3d}%|####      | {step}/60 [00:10<00:30,  2.00it/s]"


def read(folder: Path) -> tuple[pd.DataFrame, Analysis, str]:
    job = load_job(folder)
    analysis = analyse(job)
    said = " ".join(finding.sentence for finding in find_all(job, analysis))
    return job.logs["iterations"], analysis, said


def test_lines_without_times_are_timed_by_their_writing(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    at = 1_700_000_000.0
    for step in range(1, 41):
        at += 9.0 if step == 30 else 1.0
        logs.write(at, f"0: step {step}/40 loss {4 / step:.4f}")
        if step == 20:
            logs.write(at + 1, "0: saving checkpoint at iteration 20 to /ckpt")
            at += 60.0
    table, analysis, said = read(tmp_path)
    assert table["step"].tolist() == list(range(1, 41))
    times = analysis.times.set_index("step")["took_s"]
    assert 21 not in times.index, "the time of the checkpoint"
    assert times[30] == 9.0 and times.median() == 1.0
    assert [found.step for found in analysis.outliers] == [30]
    assert "the slowest of them, step 30, took 9 s against 1 s, the median of 37 steps" in said
    assert analysis.goodput.useful_s == pytest.approx(40), "at the pace: step 30 may hold a pause"


def test_evaluations_are_no_steps_that_stand_out_and_slow_stretches_have_their_own(
    tmp_path: Path,
) -> None:
    logs = NodeLogs(tmp_path)
    for at, step in enumerate(range(0, 601, 10)):
        if is_evaluated := step % 100 == 0:
            logs.write(float(at), f"0: step {step}: train loss 2.7, val loss 2.8")
        took_ms = (40 if step < 400 else 120) + at % 3 + 90 * is_evaluated + 300 * (step == 520)
        logs.write(float(at), f"0: iter {step}: loss 2.7544, time {took_ms:.2f}ms, mfu 0.00%")
    _, analysis, said = read(tmp_path)
    assert [one.step for one in analysis.outliers] == [520]
    assert (
        "1 line stands out; the slowest of them, the mean of the 10 steps up to step 520, is 421 ms"
        in said
    )


def test_lines_before_the_one_that_proves_their_counter_keep_their_times(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    for step in range(50, 301, 50):
        line = f"| Epoch   1 | {step:5d}/  313 batches | ms/batch 140.38 | loss {60 / step:.8f}"
        logs.write(1_700_000_000.0 + step, f"0: {line}")
    table, _, _ = read(tmp_path)
    assert (table["written"] - 1_700_000_000.0).tolist() == [50, 100, 150, 200, 250, 300]


def test_a_bar_on_standard_error_tells_the_steps_of_losses(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    logs.write(1_700_000_000.0 - 60, "0: {'loss': 9.0, 'epoch': 0.0}")
    for step in range(0, 61, 5):
        at = 1_700_000_000.0 + 5 * step
        logs.write(at, "0: " + BAR.format(percent=step, step=step), is_err=True)
        if step % 10 == 0 and step:
            logs.write(at, f"0: {{'loss': {3 - step / 60:.3f}, 'epoch': 0.1}}")
    table, analysis, said = read(tmp_path)
    known = table.dropna(subset=["loss"])
    assert known["step"].tolist() == [10, 20, 30, 40, 50, 60]
    assert analysis.times["took_s"].median() == pytest.approx(5.0)
    assert "The loss was 2.833 at first and 2 at last" in said


def test_standard_error_is_read_only_where_standard_output_tells_no_step(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    logs.write(100.0, "0: INFO step 1 loss 2.5", is_err=True)
    logs.write(101.0, "0: INFO step 2 loss 2.25", is_err=True)
    assert read(tmp_path)[0]["step"].tolist() == [1, 2]
    logs.write(102.0, "0: step 7 loss 2.125")
    assert read(tmp_path)[0]["step"].tolist() == [7]


def test_a_bar_is_enough_where_nothing_else_is_printed(tmp_path: Path) -> None:
    """Accelerate with tqdm writes to standard error alone."""
    logs = NodeLogs(tmp_path)
    for step in range(5, 61, 5):
        bar = BAR.format(percent=step, step=step).replace("]", ", loss=2.5]")
        logs.write(1_700_000_000.0 + step, f"0: {bar}", is_err=True)
    table = read(tmp_path)[0]
    assert table["step"].tolist() == list(range(5, 61, 5))
    assert set(table["num_steps"]) == {60} and set(table["loss"]) == {2.5}


def test_learned_steps_begin_with_the_first_line(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    for at in range(12):
        logs.write(1_700_000_000.0 + at, f"0: [ep {at // 6}] it {at % 6}/6 | loss {9 - at / 9:.3f}")
        logs.write(1_700_000_000.0 + at, f"0: step {at}: train loss 0.9, val loss 4.29")
    table, analysis, said = read(tmp_path)
    assert table["step"].tolist() == list(range(12))
    assert analysis.times["took_s"].median() == pytest.approx(1.0)
    assert "The loss went from 8.944 to 7.833" in said


def test_epochs_and_evaluations_are_no_steps(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    for at in range(9):
        logs.write(1_700_000_000.0 + at, f"0: Epoch {at}/9 - loss {9 - at / 9:.3f}")
    table, _, said = read(tmp_path)
    assert table.empty
    assert "The train loss went from" in said and "at best 8.111 after epoch 8" in said


def test_a_training_loss_beside_one_of_validation_is_counted_once(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    for at in range(1, 30):
        line = f"Epoch: {at:04d} loss_train: {4 - at / 10:.2f} loss_val: {5 - at / 10:.2f} time: 1s"
        logs.write(1_700_000_000.0 + at, f"0: {line}")
    _, analysis, said = read(tmp_path)
    assert "The train loss went from" in said and "at best 1.1 after epoch 29" in said
    assert {name: len(rows) for name, _, rows in analysis.curves.list_evaluated()} == {
        "train": 29, "val": 29
    }  # fmt: skip


def test_without_steps_no_useful_time_is_claimed(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    logs.write(100.0, "0: still at it")
    _, analysis, said = read(tmp_path)
    assert isinstance(analysis.goodput.share, NotKnown)
    assert "useful" not in said


DATED = "iteration {}/ 800 | elapsed time per iteration (ms): 100.0 | lm loss: 2.0E+00 |"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([DATED.format(800)], "the first step that was read is 800"),
        ([DATED.format(1), DATED.format(2), "iteration 300/ 800 | lm loss: 2.0E+00 |"],
         "2 of 300 steps have a time"),
    ],
)  # fmt: skip
def test_few_steps_of_a_run_are_no_goodput(lines: list[str], reason: str, tmp_path: Path) -> None:
    """One dated step at the end was taken for all of the useful time: 0.05 % of it."""
    logs = NodeLogs(tmp_path)
    for line in lines:
        logs.write(100.0, f"0: {line}")
    _, analysis, said = read(tmp_path)
    share = analysis.goodput.share
    assert isinstance(share, NotKnown) and reason in share.reason
    assert "useful steps" not in said and "The first step began" not in said

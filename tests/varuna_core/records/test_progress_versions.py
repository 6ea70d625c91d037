"""The same steps as each trainer prints them: one reading of a line for status and report.

docs/decisions/monitoring.md has the reasons ("One reader of training lines").
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pythons import list_pythons
from varuna_core.agent.bundle import write_bundle
from varuna_core.records.logs.progress import join_lines, parse_line, parse_progress
from varuna_core.records.logs.steps import StepReader
from varuna_core.records.logs.training_log import EVALUATION, parse_mark
from vjob.jobs.monitor.log_lines.errors import Classifier
from vjob.jobs.monitor.readers.node_logs import LogFile
from vjob.reports.load.training_log import LogReader, LogTables

MEGATRON = (
    " iteration       30/      50 | consumed samples:         1920 | elapsed time per iteration "
    "(ms): 1423.8 | learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | "
    "loss scale: 262144.0 | grad norm: 16.666 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |"
)
CORE = (
    " [2025-05-01 12:00:00.123456] iteration       10/    1000 | consumed samples:          640 | "
    "elapsed time per iteration (ms): 2500.1 | throughput per GPU (TFLOP/s/GPU): 310.2 | learning "
    "rate: 1.500000E-06 | global batch size:    64 | lm loss: 1.080000E+01 | loss scale: 1.0 | "
    "grad norm: 9.100 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
TITAN = (
    "[rank0]:[titan] 2025-03-01 10:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  "
    "7.2034  \x1b[38;2;180;60;0mgrad_norm:  1.2  \x1b[33mmemory:  3.10GiB(3.26%)  \x1b[34mtps: "
    "1,234  \x1b[36mtflops: 12.30  \x1b[35mmfu: 3.9%\x1b[39m"
)
NEMO = (
    "[NeMo I] Training epoch 0, iteration 9/99 | lr: 1e-05 | global_batch_size: 8 | global_step: 9 "
    "| reduced_train_loss: 11.03 | train_step_timing in s: 5.25"
)
NANOTRON = (
    "iteration: 10 / 100 | consumed_tokens: 1.2M | elapsed_time_per_iteration_ms: 123 | "
    "tokens_per_sec: 1.2e4 | lm_loss: 10.2 | lr: 3e-4 | grad_norm: 1.3"
)
ENGINE = (
    "[2025-01-01 00:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, "
    "lr=[0.0001], mom=[[0.9, 0.95]]"
)
PIPELINE = "steps: 10 loss: 2.3401 iter time (s): 0.512 samples/sec: 31.2"
FACE = "{'loss': 2.3145, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.02}"

LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "Megatron-LM 3.0": (
        MEGATRON,
        {"step": 30, "num_steps": 50, "time_ms": 1423.8, "loss": 10.17721, "grad_norm": 16.666,
         "loss_scale": 262144.0, "learning_rate": 7.031e-07, "skipped": 0, "nan": 0},
    ),
    "Megatron core 0.12": (
        CORE,
        {"step": 10, "num_steps": 1000, "time_ms": 2500.1, "loss": 10.8, "learning_rate": 1.5e-06},
    ),
    "Megatron core 0.13 with experts": (
        CORE.replace("| loss scale", "| load_balancing_loss: 1.020000E+00 | loss scale"),
        {"step": 10, "time_ms": 2500.1, "loss": 10.8},
    ),
    "Megatron core 0.14 with energy": (
        CORE.replace("| learning", "| energy per GPU (J/iter/GPU): 500.1 | learning"),
        {"step": 10, "time_ms": 2500.1, "loss": 10.8},
    ),
    "Megatron core 0.16 with several tokens ahead": (
        CORE.replace("| loss scale", "| mtp_1 loss: 1.100000E+01 | loss scale"),
        {"step": 10, "time_ms": 2500.1, "loss": 10.8},
    ),
    "Megatron core 0.20 whose first step was skipped": (
        CORE.replace("| lm loss", "| mtp_1 loss: 1.100000E+01 | z_loss: 2.000000E-01 | lm loss"),
        {"step": 10, "time_ms": 2500.1, "loss": 10.8},
    ),
    "Megatron core 0.20 with all steps skipped": (
        CORE.replace("| lm loss: 1.080000E+01", "| load_balancing_loss: 1.10 | indexer loss: 0.2")
        .replace("skipped iterations:   0", "skipped iterations:  10"),
        {"step": 10, "loss": None, "skipped": 10},
    ),
    "Megatron-DeepSpeed": (
        MEGATRON + " samples per second: 45.012 | TFLOPs: 151.20 |",
        {"step": 30, "samples_per_s": 45.012},
    ),
    "a number of seconds": (
        MEGATRON.replace("(ms): 1423.8", "(s): 1.4238"), {"step": 30, "time_ms": 1423.8}
    ),
    "no number": (MEGATRON.replace("1423.8", "nan"), {"step": 30, "time_ms": None}),
    "no end": (MEGATRON.replace("1423.8", "inf"), {"step": 30, "time_ms": None}),
    "no total": (MEGATRON.replace("      50", "       0"), {"step": 30, "num_steps": None}),
    "cut in a number": (MEGATRON[: MEGATRON.index("23.8")], {"step": 30, "time_ms": None}),
    "cut in the loss": (MEGATRON[: MEGATRON.index("7721")], {"time_ms": 1423.8, "loss": None}),
    "NeMo": (
        NEMO, {"step": 9, "num_steps": 99, "time_ms": 5250, "loss": 11.03, "learning_rate": 1e-05}
    ),
    "nanotron": (
        NANOTRON,
        {"step": 10, "num_steps": 100, "time_ms": 123, "loss": 10.2, "grad_norm": 1.3,
         "learning_rate": 3e-4, "tokens_per_s": 12000},
    ),
    "nanotron, numbers for people": (
        NANOTRON.replace(": 123 ", ": 11.5K ").replace("1.2e4", "22.8K"),
        {"step": 10, "time_ms": 11500, "loss": 10.2, "tokens_per_s": 22800},
    ),
    "DeepSpeed's engine": (ENGINE, {"step": 10, "learning_rate": 1e-4, "skipped": None}),
    "DeepSpeed's pipeline": (
        PIPELINE, {"step": 10, "time_ms": 512, "loss": 2.3401, "samples_per_s": 31.2}
    ),
    "torchtitan": (
        TITAN, {"step": 10, "loss": 7.2034, "grad_norm": 1.2, "tokens_per_s": 1234}
    ),
    "nanoGPT": (
        "iter 10: loss 3.2000, time 130.22ms, mfu 5.00%",
        {"step": 10, "time_ms": 130.22, "loss": 3.2},
    ),
    "seconds since the start": (
        "step 300, train_loss=0.6123, LR=0.005, time 210.70s",
        {"step": 300, "time_ms": None, "loss": 0.6123},
    ),
    "seconds since the start, in JSON": (
        '{"step": 300, "loss": 0.61, "elapsed_s": 210.7, "seconds": 210.7}',
        {"step": 300, "time_ms": None, "loss": 0.61},
    ),
    "a number that is no number": (
        "step 5 loss 2.3 step time (ms): 1.234.5", {"step": 5, "time_ms": None, "loss": 2.3}
    ),
    "llm.c": (
        "step   10/18865 | loss 9.534 (+nanz)| norm 6.31 (+nanz)| lr 8.57e-06 | 2050.8 ms",
        {"step": 10, "num_steps": 18865, "loss": 9.534},
    ),
    "one's own": ("step 10/100 loss 2.3", {"step": 10, "num_steps": 100, "loss": 2.3}),
}  # fmt: skip


def read_row(text: str, folder: Path) -> dict[str, Any]:
    (folder / "n.out").write_text(text)
    tables = LogTables()
    LogReader(tables, "0", "n", folder / "n.out").read()
    (row,) = tables.iterations.rows
    return row


def write_core(at_s: float, step: int, time_ms: float) -> str:
    return (
        f" [2026-05-01 12:00:{at_s:09.6f}] iteration {step:8d}/     100 | consumed samples: 64 | "
        f"elapsed time per iteration (ms): {time_ms} | lm loss: 1.0E+01 | loss scale: 1.0 |\n"
    )


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (write_core(6.5, 10, 1450.0), 500.0),  # since Core 0.16: all ten steps
        (write_core(15.1, 10, 1450.0), 1450.0),  # as before: the nine since the first line
        (write_core(3.0, 10, 1450.0), 1450.0),  # neither fits: nothing is made up
        (write_core(6.5, 10, 1450.0).replace("[2026", "[x2026"), 1450.0),
    ],
)
def test_the_first_step_is_not_counted_twice(second: str, expected: float, tmp_path: Path) -> None:
    text = write_core(2.0, 1, 10000.0) + second + write_core(11.5, 20, 500.0)
    reader = StepReader()
    found = [reader.read(line) for line in text.splitlines()]
    assert [one and one.line.time_ms for one in found] == [10000.0, pytest.approx(expected), 500.0]
    (tmp_path / "n.out").write_text(text)
    tables = LogTables()
    LogReader(tables, "0", "n", tmp_path / "n.out").read()
    times = [row["time_ms"] for row in tables.iterations.rows]
    assert times == [10000.0, pytest.approx(expected), 500.0]


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ("validation loss at iteration 50 |", "val"),
        ("validation loss at iteration 50 on validation set |", "val"),
        ("validation loss at iteration 50 on test set |", "test"),
        ("validation-books loss at iteration 50 |", "val-books"),
    ],
)
def test_every_validation_line_is_read(words: str, split: str, tmp_path: Path) -> None:
    line = f"0:  {words} lm loss value: 9.8E+00 | lm loss PPL: 1.8E+04 | "
    found = parse_line(line)
    assert found is not None and found.evaluations == {split: {"lm loss": 9.8}}
    assert parse_mark(line) == (EVALUATION, False)
    (tmp_path / "n.out").write_text(f"{CORE}\n{line}\n")
    tables = LogTables()
    LogReader(tables, "0", "n", tmp_path / "n.out").read()
    (row,) = tables.evaluations.rows
    assert (row["split"], row["step"], row["value"]) == (split, 50, 9.8)


@pytest.mark.parametrize("name", LINES)
def test_status_and_report_read_a_line_alike(name: str, tmp_path: Path) -> None:
    line, expected = LINES[name]
    found = parse_progress(line)
    assert found is not None
    for key, value in expected.items():
        assert getattr(found, key) == (value if value is None else pytest.approx(value)), key
    row = read_row(line + "\n", tmp_path)
    for key, value in row.items():
        if hasattr(found, key):
            assert value == getattr(found, key), key
    log = LogFile(tmp_path / "n.out", "n", "n.out", Classifier())
    log.poll()
    (point,) = log.points
    assert (point.step, point.loss) == (found.step, found.loss)
    assert (point.step_s or 0.0) * 1000 == pytest.approx(found.time_ms or 0.0)


@pytest.mark.parametrize(
    "line",
    [
        MEGATRON[: MEGATRON.index("23.8")].replace("consumed samples:         1920 | ", ""),
        " validation loss at iteration 1000 | lm loss value: 3.2E+00 | lm loss PPL: 2.5E+01 |",
        "{'train_runtime': 120.5, 'train_steps_per_second': 0.83, 'train_loss': 2.1, 'epoch': 1.0}",
        "{'eval_loss': 2.3, 'eval_runtime': 12.0, 'epoch': 1.0}",
    ],
)
def test_what_is_about_no_step_is_left_alone(line: str) -> None:
    assert parse_progress(line) is None


def test_two_lines_about_a_step_make_one_row_of_the_report(tmp_path: Path) -> None:
    row = read_row(f"{ENGINE}\n{PIPELINE}\n", tmp_path)
    assert (row["step"], row["time_ms"], row["learning_rate"]) == (10, 512.0, 1e-4)
    first, second = parse_progress(ENGINE), parse_progress(PIPELINE)
    assert first is not None and second is not None
    assert join_lines(first, second) == replace(second, learning_rate=1e-4)


def test_a_bar_tells_the_step_of_a_loss_without_one(tmp_path: Path) -> None:
    bars = [f" {at}%|x | {at}/100 [00:05<01:30,  2.00it/s]" for at in (5, 10, 11)]
    row = read_row(f"{bars[0]}\r{bars[1]}\n{FACE}\n{bars[2]}\n", tmp_path)
    assert (row["step"], row["loss"], row["time_ms"]) == (10, 2.3145, 500.0)


def test_the_oldest_python_reads_them_from_the_agent_alone(tmp_path: Path) -> None:
    write_bundle(tmp_path / "agent.pyz")
    program = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'agent.pyz')!r})\n"
        "from varuna_core.records.logs.progress import parse_progress\n"
        "found = [parse_progress(line) for line in json.load(sys.stdin)]\n"
        "print(json.dumps([[item.step, item.time_ms, item.loss] for item in found]))\n"
    )
    pythons = list_pythons()
    lines = [line for line, _ in LINES.values()]
    done = subprocess.run(
        [pythons[min(pythons)], "-S", "-E", "-c", program],
        input=json.dumps(lines), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = [parse_progress(line) for line in lines]
    assert json.loads(done.stdout) == [[x.step, x.time_ms, x.loss] for x in here if x is not None]

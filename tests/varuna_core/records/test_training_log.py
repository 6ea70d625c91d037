"""Lines of a training log: what we write we read, and what others wrote."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.megatron_lines import parse_evaluation, parse_saved, parse_saving
from varuna_core.records.logs.training_log import (
    JOB_INFO,
    Iteration,
    MemoryLine,
    format_evaluation,
    format_iteration,
    format_job_info,
    format_memory,
    format_phase,
    format_saved,
    format_saving,
    parse_iteration,
    parse_job_info,
    parse_memory,
    parse_phase,
)

OLD = (
    " iteration      100/  500000 | elapsed time per iteration (ms): 612.3 | learning rate 1.0 | "
    "learning rate: 1.500E-04 | lm loss: 9.000000E+00 | sop loss: 5.0E-01 | loss scale: 65536.0 |"
)
NEW = (
    " [2025-05-05 10:00:00.123] iteration       20/     100 | consumed samples:          640 | "
    "elapsed time per iteration (ms): 812.5 | throughput per GPU (TFLOP/s/GPU): 101.5 | "
    "learning rate: 6.0E-06 | global batch size:    32 | lm loss: 1.05E+01 | loss scale: 1.0 | "
    "grad norm: 2.250 | num zeros: 12 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
FIGURES = st.floats(0, 1e6).map(lambda x: round(x, 1))


@given(
    step=st.integers(0, 10**8),
    total=st.integers(0, 10**8),
    samples=st.one_of(st.none(), st.integers(0, 10**12)),
    time_ms=st.one_of(st.none(), FIGURES),
    loss=st.one_of(st.none(), st.integers(1, 999).map(lambda n: n / 100)),
    scale=st.one_of(st.none(), FIGURES),
    norm=st.one_of(st.none(), FIGURES),
    skipped=st.integers(0, 99),
)
@settings(deadline=None)
def test_an_iteration_comes_back(
    step: int,
    total: int,
    samples: int | None,
    time_ms: float | None,
    loss: float | None,
    scale: float | None,
    norm: float | None,
    skipped: int,
) -> None:
    value = Iteration(
        step,
        total,
        consumed_samples=samples,
        time_ms=time_ms,
        losses={} if loss is None else {"lm loss": loss},
        loss_scale=scale,
        grad_norm=norm,
        skipped=skipped,
        nan=0,
    )
    assert parse_iteration(format_iteration(value)) == value


def test_old_and_new_labels_are_read() -> None:
    old, new = parse_iteration(OLD), parse_iteration("3: " + NEW)
    assert old is not None and new is not None
    assert (old.step, old.time_ms, old.loss, old.skipped) == (100, 612.3, 9.0, None)
    assert old.losses == {"lm loss": 9.0, "sop loss": 0.5}
    assert (new.step, new.num_steps, new.grad_norm) == (20, 100, 2.25)
    assert new.others == {"throughput per GPU (TFLOP/s/GPU)": 101.5, "num zeros": 12.0}


@pytest.mark.parametrize(("unit", "ms"), [("(ms)", 2.0), ("(s)", 2000.0), ("", 2.0)])
def test_times_come_in_the_units_that_the_label_says(unit: str, ms: float) -> None:
    found = parse_iteration(f"iteration 1/ 2 | elapsed time per iteration {unit}: 2.0 |")
    assert found is not None and found.time_ms == ms


@pytest.mark.parametrize(
    "line",
    [
        "",
        " validation loss at iteration 10 | lm loss value: 9.0E+00 | lm loss PPL: 8.1E+03 | ",
        "saving checkpoint at iteration      10 to ckpt",
        "iteration 3/ 5",
        "iteration 3/ 5 | lm loss: 1.0",
    ],
)
def test_other_lines_are_none(line: str) -> None:
    assert parse_iteration(line) is None


@given(st.text(max_size=200))
@settings(deadline=None)
def test_no_line_raises(text: str) -> None:
    for parse in (
        parse_iteration, parse_memory, parse_phase, parse_job_info, parse_saving, parse_saved,
        parse_evaluation,
    ):  # fmt: skip
        parse(text)
        parse("saving checkpoint at iteration 1 to " + text)
        parse("iteration 1/ 2 | " + text + " |")
        parse("[Rank 1] (after 2 iterations) memory (MB) | allocated: " + text)


def test_memory_phases_and_settings_come_back() -> None:
    memory = MemoryLine(24, 20, 3035.5, 3869.25, 4020.0, 4021.0)
    assert parse_memory(format_memory(memory)) == memory
    assert parse_phase(format_phase("before the start", "2023-06-14 16:08:12")) == (
        "before the start",
        "2023-06-14 16:08:12",
    )
    settings = {key: str(number) for number, key in enumerate(JOB_INFO)}
    lines = format_job_info({**settings, "OTHER": "1"}).splitlines()
    assert dict(filter(None, map(parse_job_info, lines))) == settings
    assert list(settings) == [line.partition(":")[0] for line in lines]


@given(step=st.integers(0, 10**12), folder=st.text(min_size=1).filter(str.isprintable))
@settings(deadline=None)
def test_saves_come_back(step: int, folder: str) -> None:
    folder = f"/{folder.strip()}"
    assert parse_saving("0: " + format_saving(step, folder)) == (step, folder)
    assert parse_saved(format_saved(step, folder)) == (step, folder)
    assert parse_saving(format_saved(step, folder)) is None
    assert parse_saved(format_saving(step, folder)) is None


def test_saves_are_spelt_as_megatron_does_and_read_as_its_versions_do() -> None:
    assert format_saving(100, "ckpt") == "saving checkpoint at iteration     100 to ckpt"
    assert (
        format_saved(100, "ckpt")
        == "  successfully saved checkpoint from iteration     100 to ckpt"
    )
    new = "saving checkpoint at iteration    1000 to /data/my ckpt in torch_dist format"
    assert parse_saving(new) == (1000, "/data/my ckpt")
    new = "  successfully saved checkpoint from iteration    1000 to /c [ t 1/2, p 1/4 ]\r"
    assert parse_saved(new) == (1000, "/c")


def test_an_evaluation_comes_back() -> None:
    assert parse_evaluation("[rank0]: " + format_evaluation(640)) == 640
    assert parse_evaluation("Evaluating iter 1/10") is None

"""Steps of a log: from its lines one after the other, and from when they were written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.logs.literals import find_marks
from varuna_core.records.logs.progress import (
    PatternError,
    compile_pattern,
    parse_own,
    read_pattern,
)
from varuna_core.records.logs.steps import BAR, LINE, UNNAMED, StepReader, StepReading
from varuna_core.records.logs.training_log import Iteration


def read(
    lines: Iterable[tuple[float | None, str]], reader: StepReader | None = None
) -> list[StepReading]:
    reader = reader or StepReader()
    found = [reader.read(text, at, 0.0) for at, text in lines]
    return [reading for reading in found if reading is not None]


def list_steps(lines: Iterable[str]) -> list[int]:
    return [reading.line.step for reading in read((None, line) for line in lines)]


def read_all(lines: Iterable[str], pattern: str | None = None) -> list[Iteration]:
    """Read lines, those that a later one proves included."""
    found = read(
        ((None, line) for line in lines), StepReader(compile_pattern(pattern) if pattern else None)
    )
    return [one.line for reading in found for one in (*reading.earlier, reading)]


def list_ms(found: Iterable[StepReading]) -> list[float | None]:
    return [None if x.line.time_ms is None else round(x.line.time_ms, 3) for x in found]


def test_a_step_takes_what_lies_between_the_writing_of_two_lines() -> None:
    found = read((100.0 + 0.5 * step, f"0: step {step}/40 loss {9.5 - step}") for step in range(4))
    assert list_ms(found) == [None, 500, 500, 500]
    assert [reading.num_timed for reading in found] == [None, 1, 1, 1]
    every_tenth = read((100.0 + 0.5 * step, f"step {step} loss 2.5") for step in range(0, 40, 10))
    assert list_ms(every_tenth) == [None, 500, 500, 500]
    assert every_tenth[1].num_timed == 10


def test_a_time_in_the_line_counts_more_than_that_of_its_writing() -> None:
    found = read((100.0 + step, f"iter {step}: loss 3.1, time 130.22ms") for step in range(3))
    assert list_ms(found) == [130.22] * 3
    assert {reading.num_timed for reading in found} == {None}


def test_times_that_are_not_known_well_are_of_many_steps() -> None:
    reader = StepReader()
    lines = [(100.0 + (step // 2) * 0.25, f"step {step} loss 2.5") for step in range(0, 101)]
    found = [reader.read(text, at, 0.25) for at, text in lines]
    times = [
        reading.line.time_ms for reading in found if reading is not None and reading.line.time_ms
    ]
    assert len(times) >= 5
    assert all(time_ms == pytest.approx(125, rel=0.1) for time_ms in times)


def test_a_pause_is_blamed_on_no_step() -> None:
    reader = StepReader()
    first = read([(0.0, "step 1 loss 2.5"), (1.0, "step 2 loss 2.5")], reader)
    reader.pause()
    later = read([(60.0, "step 3 loss 2.5"), (61.0, "step 4 loss 2.5")], reader)
    assert list_ms(first + later) == [None, 1000, None, 1000]


def test_a_long_span_may_hold_a_pause() -> None:
    reader = StepReader()
    read([(float(step), f"step {step} loss 2.5") for step in range(5)], reader)
    reading = reader.read("step 5 loss 2.5", 60.0, 0.0)
    assert reading is not None and reader.is_slow(reading)


def test_lines_of_one_rank_are_followed() -> None:
    lines = [f"{rank}: step {step} loss 2.5" for step in range(9) for rank in (0, 1)]
    late = ["1: step 3 loss 2.5", "0: step 9 loss 2.5"]
    found = read((None, line) for line in [*lines, *late])
    assert not any(reading.is_anew for reading in found)
    assert found[-1].line.step == 9


def test_another_rank_is_followed_where_the_first_falls_silent() -> None:
    lines = ["0: step 1 loss 2.5", *(f"3: step {step} loss 2.5" for step in range(10, 20))]
    assert list_steps(lines)[-1] == 19


@pytest.mark.parametrize("head", ["step {}", "step {}/8", "epoch 1 step {}/8", "at {}, step {}"])
def test_ranks_that_print_one_after_the_other_do_the_same_steps(head: str) -> None:
    """Each rank may write all that it has kept when its buffer is full, or when it ends."""
    lines = [
        f"{rank}: {head.format(step, step)} loss {3 / step}"
        for steps in (range(1, 5), range(5, 9))
        for rank in (2, 0, 1)
        for step in steps
    ]
    found = read((None, line) for line in lines)
    assert not any(reading.is_anew for reading in found)
    assert found[-1].line.step == 8


@pytest.mark.parametrize("heading", ["", "Epoch {}", "Epoch {}/2"])
@pytest.mark.parametrize("line", ["step {}/8 loss 2.5", "{}/8 [====] - 1s 10ms/step - loss: 2.5"])
def test_ranks_that_print_two_epochs_one_after_the_other_do_two(heading: str, line: str) -> None:
    lines = []
    for rank in (0, 1, 2):
        for epoch in (1, 2):
            lines += [f"{rank}: {heading.format(epoch)}"] * bool(heading)
            lines += [f"{rank}: {line.format(at)}" for at in range(1, 9)]
    assert max(list_steps(lines)) == list_steps(lines)[-1] == 16


def test_the_last_step_of_another_ranks_earlier_epoch_is_no_other_start() -> None:
    lines = [
        f"{rank}: Train Epoch: {epoch} [{at}/960 ({at // 9.6:.0f}%)]\tLoss: {2 / (at + 1):.6f}"
        for rank in (0, 1)
        for epoch in (1, 2)
        for at in range(0, 960, 96)
    ]
    found = read((None, line) for line in lines)
    assert [reading.is_anew for reading in found if reading.is_anew] in ([], [True])
    assert not found[-1].is_anew and found[-1].line.step == 960 + 864
    assert not any(reading.is_anew for reading in found[20:])


def test_an_older_step_is_another_start() -> None:
    found = read((float(at), f"step {step} loss 2.5") for at, step in enumerate((5, 6, 7, 6, 7)))
    assert [reading.is_anew for reading in found] == [False, False, False, True, False]
    assert list_ms(found) == [None, 1000, 1000, None, 1000]


def test_steps_of_each_epoch_are_counted_through() -> None:
    lines = [f"epoch {epoch} step {at}/3 loss 2.5" for epoch in (1, 2) for at in (1, 2, 3)]
    assert list_steps(lines) == [1, 2, 3, 4, 5, 6]
    whole = [f"epoch {epoch} step {3 * epoch + at} loss 2.5" for epoch in (0, 1) for at in range(3)]
    assert list_steps(whole) == [0, 1, 2, 3, 4, 5]


RESUMED = [
    f"| epoch {epoch:3d} | {at:5d}/   61 batches | lr 0.0030 | ms/batch 41.66 | loss 0.{epoch}{at}"
    for epoch in (3, 4)
    for at in (10, 20, 30, 40, 50, 60)
]
OWN = r"epoch +(?P<epoch>\d+) .* (?P<step>\d+)/ *(?P<total>\d+) batches .* loss (?P<loss>\S+)"


@pytest.mark.parametrize("pattern", [None, OWN])
def test_a_resumed_program_has_done_at_least_its_earlier_epochs(pattern: str | None) -> None:
    found = read_all(["=> loaded checkpoint 'model.pt' (epoch 2)", *RESUMED], pattern)
    assert [one.step for one in found] == [61 * e + at for e in (2, 3) for at in range(10, 61, 10)]
    assert all(one.is_least and one.num_steps is None for one in found)
    assert found[0].loss == 0.310


def test_a_count_of_all_steps_is_no_count_of_an_epoch() -> None:
    lines = [
        f"epoch {epoch} at {61 * (epoch - 1) + at}/305 batches , loss 2.5"
        for epoch in (2, 3)
        for at in (1, 2, 60, 61)
    ]
    found = read_all(lines, OWN)
    assert [one.step for one in found] == [62, 63, 121, 122, 123, 124, 182, 183]
    assert not any(one.is_least for one in found)


def draw_mnist(num_epochs: int, batch: int, ranks: int = 1) -> list[str]:
    """Lines of pytorch/examples' mnist: the first number is that of the batch times its size."""
    batches = -(-60000 // batch // ranks)
    return [
        f"{rank}: Train Epoch: {epoch} [{at * batch}/60000 ({100 * at / batches:.0f}%)] Loss: 2.5"
        for epoch in range(1, 1 + num_epochs)
        for at in range(0, batches, 10)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("lines", "unit", "step"),
    [
        (draw_mnist(1, 64)[:20], "sample", 19 * 640),
        (draw_mnist(2, 64)[:100], "sample", 60000 + 5 * 640),
        (draw_mnist(2, 64, ranks=2)[:20], "epoch", 1),  # a share of the samples each
        (draw_mnist(1, 100)[:9], "epoch", 1),  # an interval that people choose, too
        ([f"Train: 0 [{at:4}/331 ({at / 3.3:.0f}%)] loss 2" for at in (0, 50, 100)], "step", 100),
        ([f"Epoch 1/5: 2%|# | {8 * at}/4580 [00:09<01:21, 5.00img/s, loss (batch)=2.5]"
          for at in range(1, 9)], "sample", 64),
    ],
)  # fmt: skip
def test_samples_are_no_steps(lines: list[str], unit: str, step: int) -> None:
    last = read((None, line) for line in lines)[-1].line
    assert (last.unit, last.step) == (unit, step)


@pytest.mark.parametrize("line", ["epoch {}/3 step {} loss 2.5", "[ep {}/3] it {} | loss 2.5"])
@pytest.mark.parametrize("first", [0, 1])
def test_an_epoch_that_goes_on_has_the_number_that_its_lines_have(line: str, first: int) -> None:
    lines = [line.format(first + at, step) for at in range(3) for step in range(100, 500, 100)]
    found = [one.line for one in read((None, line) for line in lines)]
    assert (found[-1].unit, found[-1].step) == ("epoch", first + 2)
    assert found[-1].num_steps is None, "it is not known to be over"


def test_where_an_epoch_has_steps_that_were_not_printed_only_epochs_are_known() -> None:
    lines = [f"epoch {epoch} step {at} loss 2.5" for epoch in (1, 2, 3) for at in (100, 200)]
    reader = StepReader()
    found = read(((None, line) for line in lines), reader)
    assert [(reading.line.unit, reading.line.step) for reading in found] == [
        ("step", 100), ("step", 200), *[("epoch", 2)] * 2, *[("epoch", 3)] * 2
    ]  # fmt: skip
    assert [reading.is_anew for reading in found] == [False, False, True, False, False, False]
    assert (reader.last, reader.num_steps, reader.doubt) == (3, None, None)
    assert list_steps([f"epoch {n} step {at} loss 2.5" for n in (1, 2) for at in (0, 1, 2)]) == [
        0, 1, 2, 3, 4, 5
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("epochs", "steps", "told"),
    [
        ((0, 1), (1, 41), [("step", 1), ("step", 41), ("epoch", 1), ("epoch", 1)]),
        ((0, 1), (0, 1), [("step", 0), ("step", 1), ("step", 2), ("step", 3)]),
        ((0, 0), (1, 41), [("step", 1), ("step", 41), ("step", 1), ("step", 41)]),
    ],
)
def test_a_line_may_name_the_epoch_of_the_steps_below_it(
    epochs: tuple[int, ...], steps: tuple[int, ...], told: list[tuple[str, int]]
) -> None:
    """Step 321 of the second epoch was told as step 321; the same epoch again is a restart."""
    lines = [
        line
        for epoch in epochs
        for line in (f"[GPU0] Epoch {epoch} Training", *(f"Step: {at} | Loss: 2.5" for at in steps))
    ]
    found = read((None, line) for line in lines)
    assert [(one.line.unit, one.line.step) for one in found] == told


def test_bars_of_each_epoch_are_counted_through() -> None:
    bars = [f"train: 1%|x| {at}/100 [00:05<01:30,  2.00it/s]" for at in (50, 100, 50, 100)]
    assert list_steps(bars) == [50, 100, 150, 200]
    named = [
        f"Epoch {epoch}: 1%|x| {at}/100 [00:05<01:30, 2.00it/s]" for epoch in (0, 1)
        for at in (50, 100)
    ]  # fmt: skip
    assert list_steps(named) == [50, 100, 150, 200]


def test_lines_tell_more_than_bars_and_bars_with_a_name_more_than_others() -> None:
    bar = " 50%|x| 500/1000 [00:05<01:30,  2.00it/s]"
    found = read((None, line) for line in (bar, "train:" + bar, "step 3 loss 2.5", bar))
    assert [(reading.strength, reading.is_anew) for reading in found] == [
        (UNNAMED, False),
        (BAR, True),
        (LINE, True),
    ]


def test_an_evaluation_may_be_the_last_sign_of_a_step() -> None:
    """nanoGPT ends with one, and its other lines may be many steps apart."""
    said = "train loss 0.95, val loss 4.29"
    lines = [f"step 0: {said}", "iter 0: loss 3.1, time 9ms", "iter 5: loss 2.9, time 9ms"]
    reader, found = StepReader(), read((None, line) for line in [*lines, f"step 8: {said}"])
    assert [(reading.line.step, reading.line.loss) for reading in found] == [
        (0, 3.1),
        (5, 2.9),
        (8, None),
    ]
    found = read([(None, "step 8: val loss 4.29"), (None, "step 5 loss 2.5")], reader)
    assert [reading.line.step for reading in found] == [5]


def test_a_pattern_of_the_users_own_is_read() -> None:
    own = compile_pattern(r"done (?P<step>\d+) of (?P<total>\d+): L=(?P<loss>\S+) (?P<ms>\S+)ms")
    found = read([(None, "0: done 7 of 9: L=1.5 20ms"), (None, "step 3 loss 2.5")], StepReader(own))
    (reading,) = found
    assert (reading.line.step, reading.line.num_steps, reading.line.loss) == (7, 9, 1.5)
    assert reading.line.time_ms == 20
    assert find_marks(own.pattern)
    assert any(mark in b"done  of : L=. ms" for mark in find_marks(own.pattern))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("step (", "not a regular expression"),
        (r"(\d+)", "a group named step"),
        (r"(?P<step>\d+) (?P<lose>\S+)", "'lose'; groups: step, total"),
        (r"(?P<step>\d+) (a|aa)+$", "may take extremely long on some line"),
        (r"(?P<step>\d+)" + "a" * 100_000, "characters, longer than any line"),
        (r"(?P<step>\d+)(a+)+$", "may take extremely long on some line"),
    ],
)
def test_a_pattern_that_has_no_use_says_why(text: str, word: str) -> None:
    with pytest.raises(PatternError, match=re.escape(word)):
        compile_pattern(text)


def test_a_pattern_with_many_open_ends_meets_the_start_of_a_line_alone() -> None:
    own = compile_pattern(r"step (?P<step>\d+).*loss (?P<loss>[\d.]+)")
    assert parse_own(own, "step 7" + "x" * 300 + " loss 2") is not None
    assert parse_own(own, "step 7" + "x" * 500 + " loss 2") is None


def test_a_pattern_of_another_users_run_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_pattern(r"(?P<step>\d+)", tmp_path) is not None
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert read_pattern(r"(?P<step>\d+)", tmp_path) is None


def test_a_pattern_whose_case_does_not_matter_is_tried_on_all_lines() -> None:
    assert find_marks(r"(?i)STEP (?P<step>\d+)") == ()
    assert find_marks(r"(?P<step>\d+)") == ()


WORDS = st.sampled_from(
    ["step ", "iter ", "epoch ", " loss ", "1", "7/9", "%|x| ", "[00:01<00:02, ", "1.0it/s]", "]",
     '{"step": ', '"loss": ', "}", "\x1b[A", "━━", "0: ", "nan", "1e400", "9" * 30, "ms/step", "\r"]
)  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=12).map("".join)),
            st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        ),
        max_size=12,
    )
)
def test_no_lines_make_it_raise(lines: list[tuple[str, float | None]]) -> None:
    reader = StepReader()
    own = compile_pattern(r"(?P<step>.)(?P<loss>.*)")
    for text, at in lines:
        reader.read(text, at)
        parse_own(own, text)


TABLE = "| time/ | |\n| iterations | {0} |\n| train/ | |\n"
LOSSES = [
    # Lines of a step, with {0} for its number, and the loss of training that they name.
    (TABLE + "| entropy_loss | -0.67 |\n| policy_gradient_loss | -0.015 |\n| value_loss | 3.1 |",
     None),
    (TABLE + "| entropy_loss | -0.67 |\n| loss | 27.5 |\n| value_loss | 3.1 |", 27.5),
    ("it {0} | value loss: 3.1 | policy loss: 0.2 | lr 0.1", None),
    ("iter {0}/90 loss_D: 0.4 loss_G: 0.9 g_loss: 0.9", None),
    ("iter {0}/90 box_loss 0.9 cls_loss 0.8 total_loss 1.7", 1.7),
    ("update {0} | train/policy_loss -0.01 | train/loss 0.42 | grad 1.1", 0.42),
    ("step {0}/90 | training loss 0.42 | aux_loss 0.01", 0.42),
    ("round {0}/90 train iteration, lm loss: 0.42", 0.42),
    ("Train loss {0} 0.42 Grad Norm 1.3 0.71s/it", 0.42),
    ("Training average aux_loss at step {0}: 0.9\nTraining average loss at step {0}: 0.42", 0.42),
    ("Minibatch loss at step {0}: 0.42\nMinibatch accuracy: 51.0%", 0.42),
    ("Training Iteration: {0}  average_loss : 0.9  step_loss : 0.42  learning_rate : 1e-4", 0.42),
    ("train step {0}/90 avg_loss: 0.9 loss: 0.42", 0.42),
    ("train step {0}/90 avg_loss: 0.9", 0.9),
]  # fmt: skip


@pytest.mark.parametrize(("text", "loss"), LOSSES)
def test_a_part_of_a_loss_is_not_the_loss(text: str, loss: float | None) -> None:
    """PPO's policy_gradient_loss was shown as the loss of its training."""
    reader, found = StepReader(), []
    for number in range(1, 6):
        for line in text.format(number).split("\n"):
            if (reading := reader.read(line)) is not None:
                found += [one.line.loss for one in (*reading.earlier, reading)]
    assert {one for one in found if one is not None} == ({loss} if loss is not None else set())


TRAINING = [f"step {at}/90 - loss: 2.5 - 9ms/step" for at in range(10, 91, 10)]
EVALUATION = [f"step {at}/30 - loss: 2.1 - 4ms/step" for at in range(10, 31, 10)]
KERAS = [f"{at}/90 ━━━━━━━━━━ 0s 9ms/step - loss: 2.5" for at in range(10, 91, 10)]
KERAS_EVALUATION = [f"{at}/30 ━━━━━━━━━━ 0s 4ms/step - loss: 2.1" for at in range(10, 31, 10)]
YOLO = "epoch: {}/30, iter: {}/90, iter_time: 0.4s, total_loss: 2.5, lr: 1e-4"
THROUGH = "epoch: {}/2, iter: {}/90, loss: 2.5, lr: 1e-4"


@pytest.mark.parametrize(
    ("lines", "step", "total"),
    [
        (["Epoch 1/2", *TRAINING, "Eval begin...", *EVALUATION], 90, None),
        (["Epoch 1/2", *TRAINING, "Eval begin...", *EVALUATION, "Epoch 2/2", *TRAINING], 180, 180),
        ([*TRAINING, *EVALUATION], 90, 90),
        ([*TRAINING, *EVALUATION, *TRAINING[:2]], 110, None),
        ([*KERAS, *KERAS_EVALUATION], 90, 90),
        (["Epoch 1/2", *KERAS, "Epoch 2/2", *KERAS, *KERAS_EVALUATION], 180, 180),
        ([*TRAINING, *(line + " - lr: 1e-4" for line in EVALUATION)], 30, 30),
        ([YOLO.format(1, at) for at in (1, 2)], 2, None),
        ([YOLO.format(1, at) for at in (1, 10)], 10, 2700),
        ([YOLO.format(epoch, at) for epoch in (1, 2) for at in (45, 90)], 180, 2700),
        ([THROUGH.format(1 + at // 46, at) for at in range(1, 70)], 69, 90),
    ],
)
def test_a_total_is_of_an_epoch_of_all_or_of_an_evaluation(
    lines: list[str], step: int, total: int | None
) -> None:
    reader = StepReader()
    read(((None, f"0: {line}") for line in lines), reader)
    assert (reader.last, reader.num_steps) == (step, total)
    again = StepReader()
    again.go_on(reader.save())
    assert (again.last, again.num_steps) == (step, total)


@pytest.mark.parametrize(
    ("text", "is_training"),
    [
        ("[{}/60] nvcc -c csrc/train/optimizer_step_{}.cu -o build/loss_{}.o", False),
        ("[{}/60] reading data/train_loss_{}.parquet", False),
        ("[{}/60] training, loss 2.{}", True),
    ],
)
def test_the_name_of_a_file_is_not_what_a_line_is_about(text: str, is_training: bool) -> None:
    reader = StepReader()
    for at in range(1, 30):
        reader.read("0: " + text.replace("{}", str(at)))
    assert reader.last == (29 if is_training else None)

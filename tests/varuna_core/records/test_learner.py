"""Counters that are learned from lines which no pattern knows."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.logs.learner import MOST_SHAPES, Doubt, Learner, mask
from varuna_core.records.logs.steps import (
    EPOCHS,
    LEARNED,
    StepReader,
    StepReading,
    count_epochs,
    find_total,
)

LINES: dict[str, tuple[Callable[[int], str], int, int, int | None]] = {
    # the line of each reading, its last step after twelve, the first one, and the number of all
    "words of its own": (
        lambda i: f"[ep {i // 5}] it {i % 5}/5 | loss {2.5 - i / 9:.3f}", 11, 0, None
    ),
    "epochs of epochs": (
        lambda i: f"ep [{1 + i // 5}/3] [{1 + i % 5}/5] loss={2.5 - i / 9:.3f}", 12, 1, 15
    ),
    "a bar among columns": (
        lambda i: f"   {1 + i // 8}/30   2.5G  1.{i % 7}  0.9   640:  50%|██   | {1 + i % 8}/8 "
        f"[00:0{i % 8}<00:04,  5.00it/s]", 12, 1, 240,
    ),
    "a bracket": (
        lambda i: f"[{i}]\ttrain-rmse:{9 - i / 7:.5f}\ttest-rmse:{9.5 - i / 9:.5f}", 11, 0, None
    ),
    "updates": (
        lambda i: f"2024-01-01 10:00:{i:02d} | INFO | train_inner | loss={9 - i / 7:.3f}, "
        f"wps={7 * i}, num_updates={100 * i}, lr=1e-05, train_wall={9 * i}", 1100, 0, None,
    ),
    "a header": (
        lambda i: f"I20240101 00:00:{i:02d} 123 helpers.py:103] Training  [{10 * i:4d}/1000]  eta: "
        f"0:10:{i:02d}  loss: {9 - i / 7:.4f} (2.5)  time: 0.51  max mem: {900 + i}", 110, 0, 1000,
    ),
    "a row of a table": (lambda i: f"|    iterations        | {i + 1:<8} |", 12, 1, None),
    "no loss": (lambda i: f"Finished {i + 1}/60 batches", 12, 1, 60),
    "capitals": (lambda i: f"   --> STEP: {25 * i}/4000 -- LR: 0.1", 275, 0, 4000),
    "episodes": (lambda i: f"Episode {10 * i}\tLast reward: {i / 9:.2f}", 110, 0, None),
    "thousands": (lambda i: f"train {1 + i / 4:.2f}kit/20.0kit, loss={5 - i / 9:.2f}",
                  3750, 1000, 20000),
    "rounded": (lambda i: f"| step | {1e6 + 2e4 * i:.2e} |", 1220000, 1000000, None),
    "a unit that goes on": (lambda i: f"train: E=0 B={50 * i} s/sec=90{i % 10}.4 ppl={90 - i}.3",
                            550, 0, None),
    "metrics with their name last": (
        lambda i: f"It: {20 + 20 * i:04d} (0.03s) loss_train: 4.{i:02d} loss_val: 4.{i + 5:02d}",
        240, 20, None,
    ),
    "epochs from 1": (
        lambda i: f"Epoch: [{1 + i // 6}][{1 + i % 6}/6]\tLoss {9 - i / 7:.3f}", 12, 1, None
    ),
    "epochs from 1 of some": (
        lambda i: f"Epoch: [{1 + i // 6}/100][{1 + i % 6}/6] Loss {9 - i / 7:.3f}", 12, 1, 600
    ),
    "marks of thousands before a comma": (
        lambda i: f"[epoch: 0, iter: {800 + 100 * i:7,d}, lr:(2e-4,)] l_pix: 2.{i:02d}e-02",
        1900, 800, None,
    ),
    "a unit behind the number": (
        lambda i: f"{100 * (i + 1):10} iter, {i // 6} epoch / 20 epochs", 1200, 100, None
    ),
    "in each epoch and in all": (
        lambda i: f"epoch {1 + i // 4:03d}: {20 * (i % 4)} / 80 loss=7.{i:02d}, updates={20 * i}",
        220, 0, None,
    ),
}  # fmt: skip


def read(
    lines: Iterable[str], reader: StepReader | None = None
) -> tuple[StepReader, list[StepReading]]:
    reader = reader or StepReader()
    readings = [reader.read(line, float(at), 0.0) for at, line in enumerate(lines)]
    return reader, [one for found in readings if found for one in (*found.earlier, found)]


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("tag", ["", "0: ", "[rank3]: "])
def test_a_counter_is_known_from_its_third_reading(name: str, tag: str) -> None:
    make, last, first, total = LINES[name]
    reader = StepReader()
    reader.trains = True  # a line above these
    reader, readings = read((tag + make(at) for at in range(12)), reader)
    assert (reader.last, reader.num_steps, reader.strength) == (last, total, LEARNED)
    assert (readings[0].line.step, readings[0].at, reader.doubt) == (first, 0.0, None)
    assert [one.at for one in readings] == sorted({one.at for one in readings})
    reader, readings = read(tag + make(at) for at in range(2))
    assert (readings, reader.last, reader.doubt) == ([], None, Doubt.FEW)


@pytest.mark.parametrize(
    ("make", "doubt"),
    [
        (lambda i: f"{{'loss': 2.{i}, 'grad_norm': 1.2, 'epoch': {i / 9:.2f}}}", Doubt.ONLY_LOSSES),
        (lambda i: f"step {i}00, remaining wall clock time: {90 - i} s", Doubt.UNTRAINED),
        (lambda i: f"iter {i} |r| = {9 / (i + 1):.6e} alpha = 0.2{i}", Doubt.UNTRAINED),
        (lambda i: f"it {i} updates {3 * i} loss 2.{i}", Doubt.RIVALS),
        (lambda i: f"ep {4 + i // 5}: it {i % 5}, loss 2.{i}", Doubt.FIRST_EPOCH),
        (lambda i: f"Downloading shard {i}/60 of batch", None),
        (lambda i: f"evaluating step {i}/60: acc 0.{i}", None),
        (lambda i: f"processed {4096 * i} tokens of train.bin", None),
        (lambda i: f"worker {i} waits for its batch since {i} s", None),
        (lambda i: f"step of rank 3: {i * i % 7} retries", None),
        (lambda i: f"Training: {5 * i}% complete, loss 2.{i}", None),
        (lambda i: f"Trial {i} finished with 0.{i} and parameters: {{'lr': 0.{i}}}", None),
        (lambda i: f"Eval step {10 * (i + 1)}/400: loss 2.{i}, accuracy 0.7", None),
        (lambda i: f"batch {100 * i}/?, cuts processed until now: {900 * i}, epoch 9", None),
        (lambda i: f'"POST /train/status?step={i} HTTP/1.1" 200', None),
    ],
)
def test_what_is_not_known_has_its_reason(make: Callable[[int], str], doubt: Doubt | None) -> None:
    reader, readings = read(make(at) for at in range(12))
    assert [one for one in readings if one.line.step >= 0] == []
    assert (reader.last, reader.doubt) == (None, doubt)


TABLES = {
    "skorch": (
        ["  epoch    train_loss    valid_loss     dur", "-------  ------------  ----------  -----"],
        [f"      {i}        6.{i:02d}        5.{i:02d}  11.9" for i in range(1, 9)], 8, 6.08,
    ),
    "a table with bars": (
        ["| Trial name | status | iter | reward |"],
        [f"| PPO_a      | RUNNING |   {i} | 3.{i} |" for i in range(1, 9)], 8, None,
    ),
    "other columns": (
        ["| Trial name | status | iter | reward |"],
        [f"| PPO_a      | RUNNING |   {i} |" for i in range(1, 9)], None, None,
    ),
    "no header": (
        ["epoch train_loss valid_loss=3"],
        [f"      {i}        6.{i:02d}        5.{i:02d}" for i in range(1, 9)], None, None,
    ),
    "colours, and boxes": (
        ["┃ Epoch ┃ train_loss ┃ Val Loss ┃"],
        [f"│ {i} │ \x1b[36m6.{i:02d}\x1b[0m │ 5.{i:02d} │" for i in range(1, 9)], 8, 6.08,
    ),
    "values between commas": (
        ["epoch,step,loss,lr"], [f"0,{i},6.{i:02d},0.0003" for i in range(1, 9)], 8, 6.08
    ),
    "lists of losses": (
        ["Step      Train loss              Test loss               Test metric   "],
        [f"{1000 * i}      [6.{i:02d}e-02, 1.02e-03]    [1e-02, 2e-02]    []" for i in range(9)],
        8000, None,
    ),
    "words between the columns": (
        ["  Time Epoch Iteration Progress    (%Epoch)   Loss   Dev/Loss     Accuracy  Dev/Acc"],
        [f"   {i}  0   {i}   {i}/4292   1% 5.{i:02d}   59.0" for i in range(1, 9)], None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_row_has_the_names_of_its_header(name: str) -> None:
    header, rows, last, loss = TABLES[name]
    reader, readings = read([*header, *rows])
    assert reader.last == last
    assert (readings[-1].line.loss if readings else None) == loss


def test_a_bar_of_something_else_takes_back_what_its_nameless_states_counted() -> None:
    bar = "5%|#     | {i}/90 [00:{i:02d}<01:00,  1.00it/s]"
    reader, _ = read(bar.format(i=i) for i in range(1, 9))
    assert reader.last == 8
    read(["Running requests: " + bar.format(i=9)], reader)
    assert (reader.last, reader.strength) == (None, -1)


@pytest.mark.parametrize(
    ("bars", "last", "total"),
    [
        (["epoch 1: 50%|# | 40/80 [", "epoch 2: 50%|# | 40/80 ["], 120, None),
        (["Epoch 0: 50%|# | 40/80 [", "Epoch 1: 50%|# | 40/80 ["], 120, None),
        (["Epoch 1: 50%|# | 40/80 [", "Epoch 2: 50%|# | 40/80 ["], 200, None),
        (["Epoch 3/9: 50%|# | 40/80 ["], 200, 720),
    ],
    ids=["from 1", "from 0", "Lightning goes on", "one of nine"],
)
def test_a_bar_counts_its_epochs_from_0_or_from_1(
    bars: list[str], last: int, total: int | None
) -> None:
    more = ", v_num=3" if last == 200 and total is None else ""
    reader, _ = read(bar + f"00:40<00:40,  1.00it/s, loss=2.1{more}]" for bar in bars)
    assert (reader.last, reader.num_steps) == (last, total)


def test_the_second_of_two_numbers_is_no_total_if_it_grows() -> None:
    reader, _ = read(f"TRAIN Batch {e}/{100 * i} loss 2.{i}" for e in (0, 1) for i in range(1, 9))
    assert (reader.last, reader.num_steps, reader.unit) == (1, None, "epoch")


def test_a_row_of_a_loss_after_other_lines_may_be_of_an_evaluation() -> None:
    lines = []
    for epoch in range(1, 6):
        lines += [
            f"Epoch[{epoch}] Complete",
            "\tLoss: 3.5",
            f"Epoch[{epoch}] - Evaluation",
            "\tLoss: 9.5",
        ]
    losses = [one.line.loss for one in read(lines)[1] if one.line.loss is not None]
    assert losses and set(losses) == {3.5}


def test_an_evaluation_that_starts_over_is_no_rival_of_the_training() -> None:
    lines = []
    for at in range(12):
        lines.append(f"--> TIME -- GLOBAL_STEP: {25 * at}")
        lines += [f"--> STEP: {i}" for i in range(3)] if at % 5 == 4 else []
    reader = StepReader()
    reader.trains = True
    assert read(lines, reader)[0].last == 275


def test_shares_of_epochs_are_steps_where_two_digits_tell_each() -> None:
    small, large = StepReader(), StepReader()
    read(["  Num Epochs = 4", "  Total optimization steps = 200"], small)
    read(["  Num Epochs = 4", "  Total optimization steps = 2,000"], large)
    assert count_epochs([0.5, 1.64], [small]) == ([25, 82], 200, "step")
    assert count_epochs([0.5, 1.64], [large]) == ([0, 1], 4, "epoch")
    assert count_epochs([0.5, 1.64], [StepReader()]) == ([0, 1], None, "epoch")


def test_the_total_may_be_that_of_a_bar_beside_it() -> None:
    bar, _ = read(["train: 5%|#  | 41/90 [00:41<01:00,  1.00it/s]"])
    assert find_total(42, [bar]) == 90
    assert find_total(60, [bar]) is None


def test_an_epoch_is_an_epoch() -> None:
    reader, readings = read(f"Epoch {at}/30 - loss 2.{at} - acc 0.{at}" for at in range(1, 9))
    assert (reader.last, reader.num_steps, reader.strength) == (8, 30, EPOCHS)
    assert {one.line.unit for one in readings} == {"epoch"}
    reader, readings = read(
        (f"train: 1%|x| {at}/9 [00:05<01:30,  2.00it/s]" for at in (1, 2)), reader
    )
    assert readings[0].is_anew and readings[0].line.unit == "step"


def test_the_total_may_be_said_before() -> None:
    lines = [f"[{at}] train cost {1 / at:.3f}" for at in range(1, 9)]
    reader, readings = read(["max steps: 60", *lines])
    assert (reader.last, reader.num_steps) == (8, 60)
    assert readings[0].line.loss == 1.0
    assert read(["max steps: 5", *lines])[0].num_steps is None


def test_a_likelier_counter_takes_the_place_of_another() -> None:
    before = [f"[{at}] train batch read in 0.{at} s" for at in range(1, 9)]
    after = [f"it {at}/60 loss {1 / at:.3f}" for at in range(1, 9)]
    reader, readings = read([*before, *after])
    assert (reader.last, reader.num_steps) == (8, 60)
    assert [one.line.step for one in readings if one.is_anew] == [1]


def test_a_first_line_with_a_great_step_is_no_step_but_the_first() -> None:
    _, readings = read(f"it {at}/60 loss 2.{at}" for at in range(43, 47))
    assert [one.line.step for one in readings] == [43, 44, 45, 46]


def test_lines_that_are_left_out_are_no_growth() -> None:
    def make(at: int) -> str:
        return f"ep [{1 + at // 5}/30] [{1 + at % 5}/5] loss={9.5 - at / 9:.3f}"

    reader, _ = read(make(at) for at in range(5))
    reader.skip()
    read((make(at) for at in range(38, 50)), reader)
    assert (reader.last, reader.num_steps, reader.doubt) == (50, 150, None)


# Counters in lines that are made up.

WORDS = st.text(string.ascii_letters, min_size=1, max_size=7)
COUNTED = st.sampled_from(["step", "iter", "batch ", "it=", "Step: ", "update ", "iteration "])
NOISE = st.sampled_from(["loss", "acc", "time", "lr", "mem", "tokens/s", "err", "x"])


@st.composite
def training_logs(draw: st.DrawFn) -> tuple[list[str], list[int], int | None]:
    """Lines, the steps that they count, and the number of steps where they say it."""
    every = draw(st.sampled_from([1, 2, 10, 50]))
    num = draw(st.integers(1, 20))
    first = draw(st.integers(0, 30)) * every
    total = draw(st.one_of(st.none(), st.integers(first + num * every, 10**6)))
    head, tail = draw(WORDS), draw(st.lists(NOISE, max_size=4))
    counted, joint = draw(COUNTED), draw(st.sampled_from(["/", " of ", " / "]))
    random = draw(st.randoms(use_true_random=False))
    others = draw(st.lists(st.tuples(WORDS, st.integers(0, 2)), max_size=4))
    lines, steps = [], list(range(first, first + num * every, every))
    for step in steps:
        values = " ".join(f"{name} {random.random():.4f}" for name in tail)
        bound = "" if total is None else f"{joint}{total}"
        lines.append(f"[{head}] {counted}{step}{bound} | {values}")
        for word, kind in others:
            number = (random.randrange(100), f"{random.random():.2f}", 7)[kind]
            lines.append(f"{word}: {number}")
    return lines, steps, total


@given(training_logs())
def test_a_counter_is_found_or_not_known_but_never_wrong(
    log: tuple[list[str], list[int], int | None],
) -> None:
    lines, steps, total = log
    reader, readings = read(lines)
    if reader.last is not None:
        assert reader.last == steps[-1] and reader.num_steps in (None, total)
        assert [one.line.step for one in readings if one.line.step >= 0] == steps


@given(training_logs(), st.data())
def test_a_saved_reader_goes_on_at_any_line(
    log: tuple[list[str], list[int], int | None], data: st.DataObject
) -> None:
    lines = log[0]
    cut = data.draw(st.integers(0, len(lines)))
    whole, readings = read(lines)
    first, before = read(lines[:cut])
    second = StepReader()
    second.go_on(json.loads(json.dumps(first.save())))
    after = [second.read(line, float(at), 0.0) for at, line in enumerate(lines[cut:], cut)]
    assert [*before, *_flatten(after)] == readings
    assert json.dumps(second.save()) == json.dumps(whole.save())


def _flatten(found: Iterable[StepReading | None]) -> Iterator[StepReading]:
    for one in found:
        if one is not None:
            yield from (*one.earlier, one)


@given(st.lists(st.text(max_size=60), max_size=20), st.integers(1, 30))
def test_nothing_makes_it_raise_or_keep_more_than_its_bounds(lines: list[str], num: int) -> None:
    learner = Learner()
    for at, line in enumerate(lines * num):
        learner.read(at % 3, f"{line} step {at}", None, 0.0)
        learner.note_total(line)
        assert line == "" or mask(line)
    assert len(learner.save()["shapes"]) <= MOST_SHAPES


def test_a_flood_is_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of lines that differ by more than their numbers."""
    looks: list[str] = []
    monkeypatch.setattr(
        "varuna_core.records.logs.learner.mask", lambda text: (looks.append(text), mask(text))[1]
    )
    read(f"training item {at * 2654435761 % 2**32:x} of batch {at}" for at in range(20_000))
    assert len(looks) < 3000

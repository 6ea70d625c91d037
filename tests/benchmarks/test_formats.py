"""The corpus of progress formats is well formed, and its logs are what the generators say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.formats.catalog import list_apart, list_formats, list_negatives
from benchmarks.formats.model import Format, Truth
from benchmarks.formats.reading import Reading
from benchmarks.formats.score import (
    FIGURES,
    RIGHT,
    UNKNOWN,
    WRONG,
    find_false_steps,
    judge,
    score_format,
)

FORMATS = (*list_formats().values(), *list_apart().values())


@pytest.mark.parametrize("item", FORMATS, ids=lambda item: item.name)
def test_a_format_names_its_source_and_the_same_seed_makes_the_same_log(item: Format) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", item.source.repository)
    assert item.source.file and item.source.where
    log, truth = item.make()
    again, same = item.make()
    assert (log.lines, truth) == (again.lines, same)
    assert log.lines != item.make(1)[0].lines
    assert [line.at_s for line in log.lines] == sorted(line.at_s for line in log.lines)


@pytest.mark.parametrize("item", FORMATS, ids=lambda item: item.name)
def test_the_truth_is_in_range_and_its_losses_are_printed(item: Format) -> None:
    log, truth = item.make()
    text = "\n".join(line.text for line in log.lines)
    numbers = {float(one) for one in re.findall(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?", text)}
    for count in truth.counts:
        for total in count.totals:
            assert total is None or 0 <= max(count.steps, default=0) <= total
    for loss in (*truth.losses, *truth.val_losses):
        assert any(abs(loss - one) <= 1e-6 * abs(loss) for one in numbers), loss
    assert truth.num_epochs is None or str(truth.num_epochs) in text


def test_no_program_is_in_both_lists() -> None:
    assert (len(list_formats()), len(list_apart()), len(list_negatives())) == (195, 47, 72)
    known = {item.source.repository for item in list_formats().values()}
    assert not known & {item.source.repository for item in list_apart().values()}


@pytest.mark.parametrize("name", list_negatives())
def test_a_negative_has_lines(name: str) -> None:
    assert len(list_negatives()[name].make().lines) > 3


def test_a_figure_is_right_not_known_or_wrong() -> None:
    truth = Truth(steps=(40, 41), totals=(100,), losses=(2.5,), val_losses=(2.7,))
    right = Reading(step=41, total=100, loss=2.5, val_loss=2.7)
    assert judge(right, truth) == dict.fromkeys(FIGURES, RIGHT)
    assert set(judge(Reading(), truth).values()) == {UNKNOWN}
    assert judge(Reading(step=2, unit="epoch"), replace(truth, epochs=(2,)))["step"] == UNKNOWN
    wrong = Reading(step=7, total=90, loss=2.7, val_loss=2.5)
    assert set(judge(wrong, truth).values()) == {WRONG}


@pytest.mark.parametrize("name", list_negatives())
def test_no_step_is_read_where_nothing_is_trained(name: str) -> None:
    assert find_false_steps(list_negatives()[name]) == ""


@pytest.mark.parametrize("name", list_formats())
def test_a_step_of_a_format_for_development_is_right_or_not_known(name: str) -> None:
    row = score_format(list_formats()[name])
    assert WRONG not in (row.by_lines["step"], row.by_status["step"]), row.note

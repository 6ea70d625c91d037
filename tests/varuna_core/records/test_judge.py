"""One judge of traces, counted steps and lines: a number that is said is the program's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from varuna_core.facts.known import NotKnown, Value
from varuna_core.records.logs.judge import Lines, Source, Steps, Unit, judge_steps
from varuna_core.records.logs.step_counts import StepCounts, Tally, parse_counts

BEGIN = 1_800_000_000.0
PACE = 2.0


def count(num: int, *, pace: float = PACE, begin: float = 0.0) -> StepCounts:
    """Steps that end after `begin` and every `pace` seconds."""
    tally = Tally(0.0, BEGIN)
    for number in range(1, num + 1):
        tally.add(begin + number * pace)
        tally.note()
    found = parse_counts(tally.pack_head((1, 1, 1, 1, 0), num) + tally.pack_body())
    assert found is not None
    return found


def lines(steps: Any, *, per_step: float = 1.0, base: int = 0, total: int | None = None,
          pace: float = PACE) -> Lines:  # fmt: skip
    """Lines that are written shortly after the steps that their numbers stand for."""
    points = [(step, BEGIN + 0.01 + (step - base) / per_step * pace) for step in steps]
    return Lines(points[-1][0], total, tuple(points), "n0.out")


@dataclass(frozen=True)
class Case:
    """Steps by lines and by the counter, and the expected verdict."""

    name: str
    lines: Lines | None
    done: int | None
    step: int | None
    total: int | None = None
    source: Source | None = Source.COUNTER
    unit: Unit | None = Unit.STEP
    other: int | None = None


AT_THE_END = Lines(304, 320, ((304, BEGIN + 320 * PACE),))
CASES = [
    Case("nothing", None, None, None, source=None, unit=None),
    Case("a counter alone", None, 34, 34, unit=None),
    Case("lines alone", lines([10, 20], total=90), None, 20, 90, Source.LINES, None),
    Case("each step", lines(range(1, 35), total=90), 34, 34, 90),
    Case("every tenth", lines([10, 20, 30], total=90), 34, 34, 90),
    Case("from 0", lines([9, 19, 29], base=-1, total=90), 34, 33, 90),
    Case("few slow ones, printed as they begin", lines(range(5)), 5, 5),
    Case("resumed", lines([110, 120, 130], base=100, total=900), 34, 134, 900),
    Case("lines written at the end", AT_THE_END, 320, 320, 320),
    Case("at most the total", lines([20, 29, 30], total=30), 31, 30, 30),
    Case("a bar of each epoch", lines(range(1, 13), base=64, total=32), 76, 76, None,
         unit=None, other=12),
    Case("a number that falls", lines([20, 29, 8, 17], per_step=0.3), 76, 76, None,
         unit=None, other=17),
    Case("warm-up without lines", lines(range(1, 31), base=-10, total=30), 40, 30, 30),
    Case("micro-batches", lines(range(8, 120, 8), per_step=4, total=400), 30, 30, 100,
         unit=Unit.PART, other=112),
    Case("samples", lines(range(640, 6400, 640), per_step=64, total=60000), 95, 95, None,
         unit=Unit.PART, other=5760),
    Case("epochs", lines([1, 2, 3], per_step=0.1, total=5), 34, 34, 50,
         unit=Unit.SEVERAL, other=3),
    Case("no whole ratio", lines(range(10, 60, 7), per_step=1.5), 40, 59, None, Source.LINES,
         Unit.OTHER, 40),
    Case("one line", lines([43], total=60), 43, 43, 60),
    Case("one line of another number", lines([143], base=100, total=200), 43, 143, 200,
         Source.LINES, None),
    Case("one early epoch", lines([1], per_step=0.05, total=3), 25, 25, None, unit=None, other=1),
    Case("lines without times", Lines(30, 90, ((20, None), (30, None)), "n0.out"), 34, 30, 90,
         Source.LINES, None),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table_of_sources(case: Case) -> None:
    found = judge_steps(case.lines, {} if case.done is None else {0: count(case.done)})
    assert (read(found.step), read(found.total)) == (case.step, case.total)
    assert (found.source, found.other) == (case.source, case.other)
    assert (found.fit.unit if found.fit else None) == case.unit
    assert read(found.done) == case.done


def read(known: Any) -> Any:
    """The value; None with a reason."""
    assert isinstance(known, Value) or known.reason
    return known.value if isinstance(known, Value) else None


def test_lines_that_go_on_while_the_counter_stands_are_believed_and_it_is_said() -> None:
    """CUDA graphs that were not noticed look so."""
    by_lines = lines(range(1, 121), pace=1.0)
    tally = Tally(0.0, BEGIN)
    for number in (*range(1, 31), 120):
        tally.add(float(number))
        tally.note()
    counts = parse_counts(tally.pack_head((1, 1, 1, 1, 0), 31) + tally.pack_body())
    assert counts is not None
    found = judge_steps(by_lines, {0: counts})
    assert (read(found.step), found.source, found.other) == (120, Source.LINES, 31)


def test_a_captured_optimizer_has_no_number() -> None:

    counts = replace(count(3), is_captured=True)
    found = judge_steps(None, {0: counts})
    assert isinstance(found.step, NotKnown) and "CUDA graph" in found.step.reason
    found = judge_steps(lines([10, 20], total=90), {0: counts})
    assert (read(found.step), found.source) == (20, Source.LINES)


@pytest.mark.parametrize("pace", [0.001, 0.01, 0.1, 3.0])
@pytest.mark.parametrize("base", [0, 1000])
def test_times_that_are_not_sure_make_no_step_up(pace: float, base: int) -> None:
    """Half a second is many quick steps; what is said is at most a line old, and never ahead."""
    by_lines = lines(range(base + 100, base + 3100, 100), base=base, pace=pace, total=9000)
    late = Lines(
        by_lines.step,
        by_lines.total,
        tuple((s, a + 0.4) for s, a in by_lines.points),
        "n0.out",
        0.5,
    )
    found = judge_steps(late, {0: count(3050, pace=pace)})
    assert base + 3000 <= read(found.step) <= base + 3050
    assert read(found.total) == 9000


@pytest.mark.parametrize("base", [53, 100, 158])
@pytest.mark.parametrize("slack_s", [0.0, 0.5])
def test_the_step_of_a_resumed_program_does_not_fall_back_to_a_count(
    base: int, slack_s: float
) -> None:
    was_own = False
    for done in range(1, 150):
        numbers = [step for step in range(base + 1, base + done + 1) if step % 10 == 0]
        if not numbers:
            continue
        by_lines = replace(lines(numbers, base=base, total=300, pace=0.13), slack_s=slack_s)
        found = judge_steps(by_lines, {0: count(done, pace=0.13)})
        assert not (was_own and found.is_counted), (done, found.step)
        was_own = not found.is_counted
        assert read(found.step) in (done, *range(numbers[-1], base + done + 1))
        if found.source is Source.COUNTER and not found.is_counted:
            assert found.is_least or read(found.step) == min(base + done, 300)
    assert was_own


def test_ranks_are_told_apart() -> None:
    found: Steps = judge_steps(None, {0: count(25), 1: count(400, pace=0.1)})
    assert read(found.step) == 400
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.done) == (0, 25)
    assert [one.rank for one in found.ranks] == [0, 1]


@pytest.mark.parametrize(
    ("step", "count_", "unit", "said", "other"),
    [
        (320, 80, "step", 80, 320),  # a bar of micro-batches, drawn once: four a step
        (321, 80, "step", 80, 321),
        (1000, 80, "step", 1000, None),  # a program that went on from step 920
        (12, 4, "step", 12, None),  # too few to tell
        (1, 80, "epoch", 80, 1),
        (2, 3, "epoch", 3, 2),
    ],
)
def test_one_number_of_another_thing_is_not_told_as_the_step(
    step: int, count_: int, unit: str, said: int, other: int | None
) -> None:
    one = Lines(step, step, ((step, BEGIN + count_ * PACE),), "n0.out", unit=unit)
    found = judge_steps(one, {0: count(count_)})
    assert isinstance(found.step, Value) and found.step.value == said
    assert found.other == other

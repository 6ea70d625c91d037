"""ranks/<rank>.steps: what is read is true, however little of the file is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.logs import step_counts
from varuna_core.records.logs.step_counts import (
    FILE_BYTES,
    HEAD_BYTES,
    MOST_POINTS,
    NUM_LONGEST,
    NUM_RECENT,
    StepCounts,
    Tally,
    claim_file,
    parse_counts,
)

WALL = 1_800_000_000.0
OWNER = (1, 2, 3, 4, 0)
DURATIONS = st.lists(st.floats(0, 1e5), max_size=400)


def tally(durations: list[float]) -> Tally:
    """Steps of these durations, the first of which nobody knows."""
    found, now = Tally(0.0, WALL), 5.0
    found.add(now)
    found.note()
    for took in durations:
        now += took
        found.add(now)
        found.note()
    return found


def pack(found: Tally) -> bytes:
    return found.pack_head(OWNER, found.count) + found.pack_body()


def parse(data: bytes) -> StepCounts:
    counts = parse_counts(data)
    assert counts is not None
    return counts


@given(DURATIONS)
def test_counts_and_times_are_read_as_they_were_written(durations: list[float]) -> None:
    found = tally(durations)
    data = pack(found)
    counts = parse(data)
    assert len(data) == FILE_BYTES
    assert (counts.count, counts.num_timed) == (1 + len(durations), len(durations))
    assert counts.first_at == WALL + 5
    assert counts.last_at == WALL + found.last
    assert sum(s for _, s in counts.durations) == pytest.approx(sum(durations), rel=1e-6, abs=1e-6)
    ends = [counts.points[0], counts.points[-1]]
    assert ends == [(1, counts.first_at), (counts.count, counts.last_at)]
    assert list(counts.points) == sorted(counts.points)
    longest = sorted(durations, reverse=True)[:NUM_LONGEST]
    assert sorted((x.seconds for x in counts.longest), reverse=True) == pytest.approx(
        longest, abs=1e-9, rel=1e-9
    ) or len(longest) < len(counts.longest)


@given(DURATIONS, st.integers(0, FILE_BYTES))
def test_a_file_that_is_cut_tells_less_and_nothing_false(
    durations: list[float], length: int
) -> None:
    data = pack(tally(durations))
    whole, counts = parse(data), parse_counts(data[:length])
    if length < HEAD_BYTES:
        assert counts is None
        return
    assert counts is not None
    assert (counts.count, counts.last_at) == (whole.count, whole.last_at)
    assert set(counts.points) <= {*whole.points, (1, whole.first_at)}


@given(st.binary(max_size=200))
def test_anything_else_is_no_file_of_steps(data: bytes) -> None:
    assert parse_counts(data) is None


@given(st.integers(2, 40_000), st.floats(1.0, 100.0))
def test_points_are_bounded_and_the_first_and_the_last_stay(count: int, seconds: float) -> None:
    found = Tally(0.0, WALL)
    for number in range(count):
        found.add(number * seconds)
        found.note()
    counts = parse(pack(found))
    assert len(counts.points) <= MOST_POINTS + NUM_RECENT + 1
    assert counts.points[0] == (1, WALL)
    assert counts.points[-1] == (count, WALL + (count - 1) * seconds)
    middle = (count - 1) * seconds / 2
    assert counts.count_at(WALL + middle) == pytest.approx(1 + middle / seconds, abs=1)


@pytest.mark.parametrize(
    ("durations", "median", "pauses"),
    [
        ([0.5] * 9, 0.5, 0.0),
        ([0.5] * 9 + [30.5], 0.5, 30.0),
        ([0.1, 10.1] * 3 + [0.1], 0.1, 30.0),
    ],
)
def test_pauses_are_what_slow_steps_took_beyond_a_usual_one(
    durations: list[float], median: float, pauses: float
) -> None:
    counts = parse(pack(tally(durations)))
    assert counts.median_s == pytest.approx(median, rel=0.05)
    assert counts.pauses_s == pytest.approx(pauses, rel=0.01)
    assert counts.steps_s == pytest.approx(sum(durations) - pauses + median, rel=0.03)


@pytest.mark.parametrize("least", [0.020, 0.022, 0.025, 0.028])
def test_the_median_is_found_within_a_class_of_durations(least: float) -> None:
    """The mean of a class stood for the median: 5 % too much, or 4 % too little."""
    durations = [least * (1 + number / 200) for number in range(201)]
    counts = parse(pack(tally(durations)))
    assert counts.median_s == pytest.approx(1.5 * least, rel=0.015)


def test_one_step_has_no_pace() -> None:
    counts = parse(pack(tally([])))
    assert (counts.count, counts.median_s, counts.pauses_s, counts.steps_s) == (1, None, None, None)


def test_a_body_of_before_is_read_under_a_newer_head(tmp_path: Path) -> None:
    """A kill leaves a head that is a tenth of a second old and a body that is a second old."""
    file = claim_file(str(tmp_path / "0.steps"))
    assert file is not None
    found = tally([0.25] * 8)
    file.write(found, whole=True)
    found.add(found.last + 0.25)
    file.write(found, whole=False)
    counts = parse((tmp_path / "0.steps").read_bytes())
    assert (counts.count, counts.num_timed, counts.points[-1][0]) == (10, 8, 10)


def test_a_process_takes_over_from_a_dead_one_and_from_no_living_one(tmp_path: Path) -> None:
    path = tmp_path / "0.steps"
    code = (
        "import runpy, sys; m = runpy.run_path(sys.argv[1]); f = m['claim_file'](sys.argv[2])\n"
        "t = m['Tally'](0.0, 1.0); t.add(1.0); print(f and f.write(t, whole=True))"
    )
    words = [sys.executable, "-S", "-c", code, step_counts.__file__, str(path)]

    def claim() -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    assert claim() == "None" and parse(path.read_bytes()).starts == 1
    mine = claim_file(str(path))
    assert mine is not None
    mine.write(tally([1.0] * 4), whole=True)
    assert (parse(path.read_bytes()).starts, parse(path.read_bytes()).earlier) == (2, 1)
    before = path.read_bytes()
    claim()
    assert path.read_bytes() == before, "a child of a process that counts writes nothing"
    os.truncate(path, 3)
    assert claim_file(str(path)) is None, "somebody is about to write it"

"""The marks that say when a node's lines were written."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.logs.times import Cut, MarkReader, format_mark, move_marks, parse_marks


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 500), st.integers(0, 500)), max_size=20
    ),
    st.integers(0, 10_000),
)
def test_a_line_has_the_time_of_the_last_mark_at_or_before_it(
    steps: list[tuple[int, int, int]], offset: int
) -> None:
    time, out, err, said, marks = 0.0, 0, 0, b"", []
    for later_ms, more_out, more_err in steps:
        time += later_ms / 1000
        marks.append((round(time, 3), out, err))
        said += format_mark(time, out, err)
        out, err = out + more_out, err + more_err
    for column, times in enumerate(parse_marks(said), start=1):
        before = [mark[0] for mark in marks if mark[column] <= offset]
        assert times.find(offset) == (before[-1] if before else None)


@given(st.binary(max_size=200))
def test_whatever_stands_in_the_file_offsets_and_times_rise(data: bytes) -> None:
    for times in parse_marks(data):
        assert list(times.offsets) == sorted(set(times.offsets))
        assert list(times.times) == sorted(times.times)


def test_a_torn_mark_and_a_clock_that_steps_back_do_no_harm() -> None:
    out, err = parse_marks(b"100.000 0 0\nrubbish\nnan 5 5\n90.000 50 8\n101.0 9")
    assert out.find(0) == 100.0 and out.find(60) == 100.0
    assert err.offsets == (0, 8)
    assert parse_marks(b"")[0].find(0) is None


def test_a_file_without_an_end_of_line_is_not_held(tmp_path: Path) -> None:
    """A sparse file of 10 GB was one line, and a MemoryError."""
    path = tmp_path / "a.times"
    path.write_bytes(b"1.0 5 0\n")
    os.truncate(path, 1 << 40)
    reader = MarkReader(path, is_err=False)
    assert reader.find_exact(5) == (1.0, 0.0)


def test_a_file_of_other_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.times"
    path.write_bytes(b"1.0 5 0\n" + b"{}\n" * 1_000_000 + b"2.0 9 0\n")
    reader = MarkReader(path, is_err=False)
    assert reader.find_exact(50)[0] == 1.0 and reader.save()[1] < 100_000


def test_pieces_of_earlier_marks_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.times"
    path.write_bytes(b"".join(format_mark(at / 4, at, 0) for at in range(50_000)))
    reader = MarkReader(path, is_err=False)
    places = [0, 7, 40_000, 40_001, 49_999, 60_000]
    assert [reader.find_exact(place)[0] for place in places] == [
        min(place, 49_999) / 4 for place in places
    ]


def test_marks_move_with_the_log_out_of_which_a_part_was_cut() -> None:
    """Of those that now stand at one place of both logs only the last is kept."""
    cut = Cut(place=100, begin=500, end=160, num_bytes=340)
    marks = b"1.000 0 0\n2.000 90 7\n3.000 300 7\n4.000 450 7\ntorn\n5.000 450 9\n6.000 540 9\n"
    assert move_marks(marks, 0, cut) == (
        b"1.000 0 0\n2.000 90 7\n4.000 100 7\n5.000 100 9\n6.000 200 9\n"
    )
    assert move_marks(b"1.000 5 0\n2.000 6 540\n", 1, cut) == b"1.000 5 0\n2.000 6 200\n"

"""Ends of log files: torn, rotated, binary, with escapes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.logs.tail import ANCHOR_BYTES, LONGEST, Follower, clean, last_lines


def test_escapes_cannot_reach_the_terminal() -> None:
    assert clean("\x1b]0;owned\x07 ok\tx") == "\\x1b]0;owned\\x07 ok\tx"
    assert clean("\x1b[1monly if you trust it\x1b[0m.\x1b[2J") == "only if you trust it.\\x1b[2J"


def test_of_a_progress_bar_only_the_last_state_shows(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"start\n 10%\r 50%\r100%\n")
    assert last_lines(path, 2) == ["start", "100%"]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none", 3) == []
    assert list(Follower(tmp_path / "none").read()) == []
    assert last_lines(tmp_path / "\ud800", 3) == [], "a name out of a damaged file"


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\ntw")
    follower = Follower(path)
    assert list(follower.read()) == ["one"]
    with path.open("ab") as handle:
        handle.write(b"o\nthree")
    assert list(follower.read()) == ["two"]
    assert list(follower.read(final=True)) == ["three"]


def test_a_line_without_an_end_is_not_held_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "a"
    size = 5 * LONGEST
    path.write_bytes(b"x" * size)
    follower = Follower(path, read_bytes=LONGEST // 2)
    pieces = list(follower.read(final=True))
    assert sum(map(len, pieces)) == size and max(map(len, pieces)) <= 2 * LONGEST


def test_a_hole_of_a_terabyte_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo")
    os.truncate(path, 1 << 40)
    with path.open("ab") as handle:
        handle.write(b"\nthree\n")
    lines = list(Follower(path).read_placed())
    assert lines[0] == (0, "one") and lines[1][1].startswith("two\\x00")
    assert lines[-1] == ((1 << 40) + 1, "three") and len(lines) < 12


def test_a_file_that_shrank_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\n")
    follower = Follower(path)
    list(follower.read())
    path.write_bytes(b"new\n")
    assert list(follower.read()) == ["new"]


logs = st.binary(max_size=300) | st.text("a\n\r", max_size=20).map(str.encode)


@given(data=logs, count=st.integers(0, 6))
def test_starting_at_the_last_lines_gives_exactly_those(data: bytes, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(data)
        whole = list(Follower(path).read(final=True))
        some = list(Follower(path, start_lines=count).read(final=True))
        assert some == whole[max(0, len(whole) - count) :]


def test_a_follower_that_goes_on_gets_a_long_line_whole_that_was_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "n0.out"
    path.write_bytes(b"a line before\n" * 10_000 + b"step 7 " + b"x" * (ANCHOR_BYTES + 50))
    follower = Follower(path)
    assert len(list(follower.read())) == 10_000
    saved = follower.save()
    with path.open("ab") as log:
        log.write(b" end\nnext\n")
    other = Follower(path)
    other.go_on(saved)
    assert list(other.read()) == ["step 7 " + "x" * (ANCHOR_BYTES + 50) + " end", "next"]

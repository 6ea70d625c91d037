"""Ends of files that grow, shrink, vanish and are replaced, against a plain model of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vjob.jobs.monitor.log_lines import tails
from vjob.jobs.monitor.log_lines.tails import LONGEST, Added, Budget, Tail, show

PIECES = st.sampled_from([b"one\n", b"two", b"\n", b"\r 10%", b"\r 20%", b"x" * 30, b"\xff\x00\n"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(PIECES, max_size=5).map(b"".join)),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("replace"), st.lists(PIECES, max_size=5).map(b"".join)),
        st.tuples(st.just("remove"), st.none()),
        st.tuples(st.just("nothing"), st.none()),
    ),
    max_size=12,
)


class Model:
    """The file's bytes, and how many of them were looked at."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.seen = 0

    def take(self) -> bytes:
        data = self.data or b""
        end = data.rfind(b"\n") + 1
        fresh = data[self.seen : end] if end > self.seen else b""
        self.seen = max(self.seen, end)
        return fresh


def collapse(lines: bytes) -> list[str]:
    return [show(line) for line in lines.split(b"\n")]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_every_whole_line_is_told_once_whatever_becomes_of_the_file(
    tmp_path: Path, steps: list[tuple[str, object]]
) -> None:
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    kept = []
    tail, model = Tail(path), Model()
    for kind, value in steps:
        if kind == "append" and isinstance(value, bytes):
            with path.open("ab") as handle:
                handle.write(value)
            model.data = (model.data or b"") + value
        elif kind == "truncate" and isinstance(value, int) and model.data is not None:
            if value >= len(model.data):
                continue
            os.truncate(path, value)
            model.data, model.seen = model.data[:value], 0
        elif kind == "replace" and isinstance(value, bytes):
            if path.exists():
                kept.append(path.rename(tmp_path / f"old{len(kept)}"))  # its inode stays taken
            path.write_bytes(value)
            model.data, model.seen = value, 0
        elif kind == "remove" and path.exists():
            kept.append(path.rename(tmp_path / f"old{len(kept)}"))
            model.data, model.seen = None, 0
        added = tail.poll()
        assert collapse(added.data if added else b"") == collapse(model.take())
        if model.data is not None:
            rest = model.data[model.data.rfind(b"\n") + 1 :]
            assert show(tail.rest) == show(rest)
    for old in kept:
        old.unlink()


def look(tail: Tail) -> Added:
    added = tail.poll()
    assert added is not None
    return added


def test_the_first_look_reads_the_end_alone_and_nothing_new_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(1000)))
    tail = Tail(path, tail_bytes=100)
    added = look(tail)
    assert added.data.startswith(b"line 9") and added.data.endswith(b"line 999\n")
    assert len(added.data) <= 100 and added.is_anew
    assert added.start == added.num_skipped == path.stat().st_size - len(added.data)
    assert tail.poll() is None


def test_more_than_a_look_may_read_is_passed_over_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "LOOK_BYTES", 100)
    path = tmp_path / "log"
    path.write_bytes(b"start\nto")
    tail = Tail(path)
    assert look(tail).data == b"start\n"
    with path.open("ab") as handle:
        handle.write(b"rn\n" + b"middle\n" * 100 + b"end\n")
    added = look(tail)
    assert added.data.endswith(b"middle\nend\n") and not added.is_anew
    assert added.num_skipped > 500 and len(added.data) <= 100


def test_what_was_skipped_is_searched_from_its_end_as_far_as_the_budget_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "SEARCHED_BYTES", 37)  # so that lines lie across two reads
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"step %d\n" % n + b"other words here\n" * 9 for n in range(20)))
    tail = Tail(path, tail_bytes=30)
    look(tail)
    assert tail.skipped is not None
    some = [line for _, line in tail.search_back((b"step", b"ep "), Budget(1000))]
    low, end = tail.skipped
    assert some[0] == b"step 19" and low == 0 and end > 1000
    rest = list(tail.search_back((b"step",), Budget()))
    assert [*some, *(line for _, line in rest)] == [b"step %d" % n for n in range(19, -1, -1)]
    assert tail.skipped is None
    whole = path.read_bytes()
    assert all(whole[place:].startswith(line + b"\n") for place, line in rest)
    assert list(tail.search_back((b"step",), Budget())) == []


def test_a_gigabyte_without_an_end_of_line_costs_no_more_than_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as handle:
        handle.truncate(1 << 30)
        handle.seek(0, os.SEEK_END)
        handle.write(b"newest")
    tail = Tail(path)
    assert look(tail).data == b""
    assert tail.rest.endswith(b"newest") and len(tail.rest) <= LONGEST
    with path.open("ab") as handle:
        handle.write(b"\nnext\n")
    assert look(tail).data == b"next\n"


def test_of_a_line_that_grows_and_grows_the_beginning_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    for _ in range(10):
        with path.open("ab") as handle:
            handle.write(b"begin " + b"x" * 10_000)
        tail.poll()
        assert len(tail.rest) <= LONGEST
    with path.open("ab") as handle:
        handle.write(b"\nnext\n")
    first, second, _ = look(tail).data.split(b"\n")
    assert first.startswith(b"begin x") and len(first) == LONGEST and second == b"next"


def test_a_file_that_may_not_be_read_says_why_and_is_taken_up_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    look(tail)

    def fail(*args: object, **more: object) -> None:
        raise OSError(116, "Stale file handle")

    with path.open("ab") as handle:
        handle.write(b"two\n")
    with monkeypatch.context() as patch:
        patch.setattr(tails.os, "open", fail)
        assert tail.poll() is None and tail.problem == "Stale file handle"
    assert look(tail).data == b"two\n" and tail.problem == ""


def test_a_folder_or_a_pipe_under_the_name_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        tail = Tail(tmp_path / name)
        assert tail.poll() is None and tail.problem, name


def test_what_is_shown_moves_no_cursor_and_sets_no_title() -> None:
    shown = show(b"\x1b]0;owned\x07 10%\r\x1b[2J 20% \xff\n")
    assert "\x1b" not in shown and "\x07" not in shown
    assert shown == "\\x1b[2J 20% �"
    assert len(show(b"x" * 100_000)) < 3000

"""Whole lines out of pieces, as the docstring of lines.py draws them."""

from varuna_core.agent.processes.output import BAR_S, IDLE_S, LONGEST, LineSplitter


def test_lines_are_put_together_from_pieces() -> None:
    splitter = LineSplitter()
    found = [splitter.feed(piece, 0) for piece in (b"lo", b"ss 1\nlos", b"s 2\n")]
    assert found == [[], [b"loss 1"], [b"loss 2"]]


def test_empty_lines_are_lines() -> None:
    assert LineSplitter().feed(b"a\n\nb\n", 0) == [b"a", b"", b"b"]


def test_a_line_without_an_end_is_due_when_idle() -> None:
    splitter = LineSplitter()
    splitter.feed(b"Password: ", 0)
    assert splitter.due(IDLE_S / 2) is None
    assert splitter.due(IDLE_S) == b"Password: "
    assert splitter.feed(b"\n", 2) == [], "its end is not a line of its own"
    assert splitter.feed(b"\n", 3) == [b""]


def test_a_progress_bar_is_shown_now_and_then_and_at_its_end() -> None:
    splitter = LineSplitter()
    shown = []
    for number in range(100):
        now = number / 10
        assert splitter.feed(b"\r%3d%%" % number, now) == []
        shown.append(splitter.due(now))
    assert [line for line in shown if line] == [b"%3d%%" % (BAR_S * 10)]
    assert splitter.feed(b"\r100%\n", 10) == [b"100%"]


def test_a_carriage_return_before_the_end_is_part_of_the_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"windows\r", 0) == []
    assert splitter.feed(b"\nnext\r\n", 0) == [b"windows", b"next"]


def test_endless_lines_are_cut() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"z" * 70000, 0) == [b"z" * LONGEST]
    assert splitter.feed(b"\n", 0) == [b"z" * (70000 - LONGEST)]
    assert splitter.feed(b"y" * 70000 + b"\n", 0) == [b"y" * LONGEST, b"y" * (70000 - LONGEST)]


def test_the_end_of_the_stream_ends_a_line() -> None:
    splitter = LineSplitter()
    splitter.feed(b"Killed", 0)
    assert splitter.flush() == b"Killed"
    assert splitter.flush() is None

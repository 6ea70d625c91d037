"""The progress line: at most one a second, nothing where nobody watches."""

from __future__ import annotations

import io

from varuna_core.data.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_or_a_pipe_gets_nothing() -> None:
    stream = io.StringIO()
    progress = ProgressLine(100, stream, clock=iter(range(100)).__next__)
    for done in range(50):
        progress.show(done)
    progress.close()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_line_a_second_that_fits_and_is_cleared() -> None:
    stream = Terminal()
    times = iter([n / 10 for n in range(200)])
    progress = ProgressLine(100_000_000, stream, clock=lambda: next(times))
    for done in range(100):
        progress.show(done * 1_000_000, "a note " * 20)
    progress.close()
    lines = stream.getvalue().split("\r")[1:]
    assert 9 <= len(lines) - 2 <= 10
    assert all(len(line) < 80 and line.isascii() for line in lines)
    assert "[###" in lines[2] and "MB/s" in lines[2] and "s left" in lines[2]
    assert not lines[-1] and not lines[-2].strip()

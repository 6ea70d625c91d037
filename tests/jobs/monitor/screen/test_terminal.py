"""Where the screen opens, and where text is printed instead."""

from __future__ import annotations

import io
import sys

import pytest

from vjob.jobs.monitor.screen.start import STREAMS, can_show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("piped", [None, *STREAMS])
def test_a_pipe_anywhere_is_no_terminal(piped: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STREAMS:
        monkeypatch.setattr(sys, name, io.StringIO() if name == piped else Terminal())
    assert can_show({"TERM": "xterm"}) is (piped is None)
    assert not can_show({"TERM": "dumb"}) and not can_show({})


def test_without_textual_there_is_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STREAMS:
        monkeypatch.setattr(sys, name, Terminal())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not can_show({"TERM": "xterm"})

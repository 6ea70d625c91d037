"""The signals of a run that is followed on the terminal that started it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.log_lines.print_logs import LineFilter
from vjob.shelf.run import follow
from vjob.shelf.run.follow import Screen


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGINT, signal.SIGTERM, 130),
        (signal.SIGTERM, signal.SIGINT, 143),
    ],
)
def test_no_further_signal_keeps_it_from_ending_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, code: int
) -> None:
    done: list[bool] = []

    def cancel(run: RunFolder, screen: Screen, *, now: bool, by: str) -> None:
        signal.raise_signal(second)
        signal.raise_signal(signal.SIGINT)
        done.append(now)

    monkeypatch.setattr(follow, "_follow", lambda *given, **named: signal.raise_signal(first))
    monkeypatch.setattr(follow, "cancel", cancel)
    with follow.note_sigterm() as sigterms:
        assert follow.follow_run(RunFolder(tmp_path), Screen("x"), sigterms, LineFilter()) == code
    assert done == [True]

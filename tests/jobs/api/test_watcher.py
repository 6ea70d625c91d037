"""When the watcher looks at its runs: not too often, and soon after an end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.api import watcher as watching
from vjob.jobs.api.watcher import VjobInfoWatcher


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


def test_an_outcome_that_comes_before_the_runs_end_is_looked_at_until_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch script goes on a while when the outcome is there: one look was too few, and the
    next one came only when the interval had doubled."""
    clock, looks = Clock(), []

    def look(asked: list[Any]) -> list[Any]:
        looks.append(clock.now)
        return []

    monkeypatch.setattr(watching, "view_runs", look)
    monkeypatch.setattr(watching, "time", clock)
    monkeypatch.setattr("submitit.core.core._time", clock)
    run = RunFolder(tmp_path)
    watcher = VjobInfoWatcher()
    watcher.register_run("7", run)
    for _ in range(1000):  # 100 s: the interval has grown to 30
        clock.now += 0.1
        watcher.is_done("7")
    run.attempt(0).make()
    run.attempt(0).outcome.write_text("{}")
    os.utime(run.attempt(0).outcome, (50, 50))
    begin = clock.now
    for _ in range(200):
        clock.now += 0.1
        watcher.is_done("7")
    after = [now - begin for now in looks if now > begin]
    assert 3 <= len(after) <= 5 and after[0] < 0.2 and after[2] < 6, after

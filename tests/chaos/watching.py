"""What has to hold all the time, and at the end. Each problem is a sentence; none is forgiven."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.stage import Stage
from varuna_core.records.checkpoints import find_fit, list_damaged
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

LINE = re.compile(r" iteration +(\d+)/(?:(?! iteration +\d).)*? lm loss: (\S+)")
"""Of one step: a full disk cuts a line short, and the next one follows on it."""
TWO_MANAGERS_S = 15.0
"""The lock's patience (5 s) and a slow machine: so long one may wait for another's end."""
ALIKE = 2e-5
"""Relative, between losses of layouts that add up in another order (docs/morphing.md)."""


class Watch:
    """Looks at a run again and again."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.problems: list[str] = []
        self.seen: list[dict[str, Any]] = []
        """What changed, and when."""
        self.best = -1
        """Iteration of the newest whole checkpoint; it grows, but for what is set aside."""
        self._is_less = False
        self.progress_at = time.monotonic()
        self._begun = time.monotonic()
        self._sessions: list[str] = []
        self._attempt = -1
        self._two_since: float | None = None
        self._damaged: set[str] = set()
        self._last: dict[str, Any] = {}

    def note(self, what: str, **facts: Any) -> None:
        self.seen.append({"s": round(time.monotonic() - self._begun, 1), "what": what, **facts})

    def blame(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
            self.note("problem", text=text)

    def look(self) -> None:
        self._look_at_checkpoints()
        self._look_at_manager()

    def expect_damage(self) -> None:
        """The harness itself has spoilt the newest checkpoint."""
        found = find_fit(self.stage.store)
        self.best = -1 if found is None else found.iteration

    def _look_at_checkpoints(self) -> None:
        found = find_fit(self.stage.store)
        newest = -1 if found is None else found.iteration
        if newest > self.best:
            self.best, self.progress_at = newest, time.monotonic()
        damaged = list_damaged(self.stage.store)
        is_less = newest < self.best and not any(one.iteration > newest for one in damaged)
        if is_less and self._is_less:  # a listing may fall between two renames
            self.blame(f"the checkpoint of iteration {self.best} was complete; now it is {newest}")
        self._is_less = is_less
        there = {Path(one.path).name for one in damaged}
        if self._damaged - there:
            self.blame(f"{self._damaged - there} were set aside and are gone")
        for name in sorted(there - self._damaged):
            self.note("set aside", folder=name)
        self._damaged = there

    def _look_at_manager(self) -> None:
        state = self.stage.read_state()
        session, attempt = str(state.get("session", "")), state.get("attempt", -1)
        if session and session not in self._sessions:
            self._sessions.append(session)
        if session and session != self._sessions[-1]:
            self.blame(f"manager.json went back from session {self._sessions[-1]} to {session}")
        assert isinstance(attempt, int)
        if session and attempt < self._attempt:
            self.blame(f"attempt {attempt} after {self._attempt}")
        self._attempt = max(self._attempt, attempt)
        words = ("session", "phase", "attempt", "nodes", "members", "saved", "fruitless", "why")
        told = {word: state.get(word) for word in words}
        if told != self._last:
            self._last = told
            self.note("manager", **told)
        managers = self.stage.find_managers()
        if len(managers) < 2:
            self._two_since = None
        elif self._two_since is None:
            self._two_since = time.monotonic()
        elif time.monotonic() - self._two_since > TWO_MANAGERS_S:
            self.blame(f"{len(managers)} managers for {TWO_MANAGERS_S:g} s")


def read_history(run: RunFolder) -> tuple[dict[int, float], list[str]]:
    """The loss of each step on the way to the final weights, and what does not fit in it.

    An attempt goes on from a step that an earlier one has done; of a step that was done more than
    once the last time counts, for later steps stand on it.
    """
    found: dict[int, float] = {}
    problems = []
    for attempt in run.attempts():
        text = "".join(
            path.read_text(errors="replace") for path in sorted(attempt.path.glob("ranks/*.out"))
        )
        steps = {int(step): float(loss) for step, loss in LINE.findall(text)}
        resumed = re.search(r"resumed from iteration (\d+)", text)
        first = int(resumed[1]) if resumed else 0
        where = f"attempt {attempt.number}"
        if steps and min(steps) != first + 1:
            problems.append(f"{where} begins with step {min(steps)} after iteration {first}")
        if steps and sorted(steps) != list(range(min(steps), max(steps) + 1)):
            problems.append(f"{where} leaves out steps")
        if steps and first and first not in found:
            problems.append(f"{where} goes on from step {first}, which nobody has done")
        found.update(steps)
    return found, problems


def judge_losses(run: RunFolder, *, lines_may_lack: bool) -> tuple[list[str], dict[int, float]]:
    """Every step once, with the loss that the undisturbed training has there; what is wrong with
    that, and the undisturbed losses.

    The batch of each step is its own, so a sample that came twice or never would show in the loss.
    `lines_may_lack`: the disk that holds the logs was full.
    """
    import torch

    from tests.varuna_core.programs.plain import train_plainly

    torch.set_num_threads(1)
    training = read_training(run.training)
    losses, problems = read_history(run)
    expected, _ = train_plainly(training)
    missing = sorted(set(expected) - set(losses))
    if lines_may_lack:
        problems = []
    elif missing:
        problems.append(f"{len(missing)} steps have no loss: {missing[:5]}")
    for step, loss in sorted(losses.items()):
        if loss != pytest.approx(expected[step], rel=ALIKE):
            problems.append(f"step {step}: loss {loss}, undisturbed {expected[step]}")
            break
    return problems, expected

"""Invariants of a disturbed run, checked while it goes on; each problem is a sentence."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.testbed import Testbed
from varuna_core.records.checkpoints import find_fit, list_damaged

TWO_MANAGERS_S = 15.0
"""The lock's patience (5 s) and a slow machine: so long one may wait for another's end."""


class Monitor:
    """Polls a run, and records what changed and what broke an invariant."""

    def __init__(self, testbed: Testbed) -> None:
        self.testbed = testbed
        self.problems: list[str] = []
        self.seen: list[dict[str, Any]] = []
        """Changes of the run, each with its time."""
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

    def add_problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
            self.note("problem", text=text)

    def poll(self) -> None:
        self._check_checkpoints()
        self._check_manager()

    def expect_damage(self) -> None:
        """Accept an older newest checkpoint: a fault has damaged the newest one."""
        found = find_fit(self.testbed.store)
        self.best = -1 if found is None else found.iteration

    def _check_checkpoints(self) -> None:
        found = find_fit(self.testbed.store)
        newest = -1 if found is None else found.iteration
        if newest > self.best:
            self.best, self.progress_at = newest, time.monotonic()
        damaged = list_damaged(self.testbed.store)
        is_less = newest < self.best and not any(one.iteration > newest for one in damaged)
        if is_less and self._is_less:  # a listing may fall between two renames
            self.add_problem(
                f"the checkpoint of iteration {self.best} was complete; now it is {newest}"
            )
        self._is_less = is_less
        there = {Path(one.path).name for one in damaged}
        if self._damaged - there:
            self.add_problem(f"{self._damaged - there} were set aside and are gone")
        for name in sorted(there - self._damaged):
            self.note("set aside", folder=name)
        self._damaged = there

    def _check_manager(self) -> None:
        state = self.testbed.read_state()
        session, attempt = str(state.get("session", "")), state.get("attempt", -1)
        if session and session not in self._sessions:
            self._sessions.append(session)
        if session and session != self._sessions[-1]:
            self.add_problem(
                f"manager.json went back from session {self._sessions[-1]} to {session}"
            )
        assert isinstance(attempt, int)
        if session and attempt < self._attempt:
            self.add_problem(f"attempt {attempt} after {self._attempt}")
        self._attempt = max(self._attempt, attempt)
        words = ("session", "phase", "attempt", "nodes", "members", "saved", "fruitless", "why")
        told = {word: state.get(word) for word in words}
        if told != self._last:
            self._last = told
            self.note("manager", **told)
        managers = self.testbed.find_managers()
        if len(managers) < 2:
            self._two_since = None
        elif self._two_since is None:
            self._two_since = time.monotonic()
        elif time.monotonic() - self._two_since > TWO_MANAGERS_S:
            self.add_problem(f"{len(managers)} managers for {TWO_MANAGERS_S:g} s")

"""The event of a morph: from what to what, and what it cost in parts."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Optional

from varuna_core.morph.machine import JUDGING, RUNNING, SAVING, STOPPING, State
from varuna_core.morph.orders import get_seat
from varuna_core.records.events import append_event
from varuna_core.records.files import is_listed
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.runfolder import RunFolder


class Cost:
    """When the phases of the morph under way began, by the monotonic clock.

    A manager that is killed forgets it, and the event of that morph is not written.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._marks: Dict[str, float] = {}
        self._before: Optional[Dict[str, str]] = None
        """The attempt that the morph leads away from."""

    def mark(self, before: State, state: State) -> None:
        """After each step of the machine."""
        now = time.monotonic()
        if before.phase == state.phase:
            return
        self.note_start(before)  # an attempt may be over before anybody looked at its start
        if state.phase in (SAVING, STOPPING, JUDGING):
            self._marks.setdefault("ending", now)
        if state.phase == JUDGING:
            self._marks["ended"] = now
            self._before = {"shape": self._describe(before.attempt), "reason": state.why}
        if state.phase == RUNNING:
            self._marks["started"] = now

    def note_start(self, state: State) -> None:
        """Write the event once the ranks of the new attempt have started."""
        marks, before = self._marks, self._before
        if state.phase not in (RUNNING, SAVING) or "started" not in marks:
            return
        if not is_listed(self._run.attempt(state.attempt).go):
            return
        now, self._marks, self._before = time.monotonic(), {}, None
        if before is None:  # the first attempt of this job
            return
        facts: Dict[str, Any] = {
            "from": before["shape"],
            "to": self._describe(state.attempt),
            "attempt": state.attempt,
            "nodes": [get_seat(node) for node in state.members],
            "iteration": state.base,
            "reason": before["reason"],
            "stop_s": round(marks["ended"] - marks["ending"], 3),
            "plan_s": round(marks["started"] - marks["ended"], 3),
            "start_s": round(now - marks["started"], 3),
        }
        with contextlib.suppress(OSError):
            append_event(self._run.morph_events, "morph", **facts)

    def _describe(self, number: int) -> str:
        """Pipeline x data, and x tensor where layers are shared."""
        plan = read_attempt_plan(self._run, number)
        if plan is None:
            return "?"
        shape = f"{plan.pipeline} x {plan.data}"
        return shape if plan.tensor == 1 else f"{shape} x {plan.tensor}"

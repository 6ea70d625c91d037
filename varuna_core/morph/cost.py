"""Cost of a morph, in parts, and its event.

last sign of life ─ notice ─► it ends ─ stop ─► ended ─ plan ─► ordered
─ start ─► ranks run ─ load ─► they have all ─ first step ─► a step more than before
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Optional

from varuna_core.morph.furthest import Furthest
from varuna_core.morph.node_observer import NodeObserver
from varuna_core.records.exits import read_exits
from varuna_core.records.files import is_listed
from varuna_core.records.logs.rank_output import locate_output
from varuna_core.records.logs.training_log import BEGIN, FIRST_STEP
from varuna_core.records.morphing import JUDGING, RUNNING, SAVING, STOPPING, ManagerState, get_seat
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import MORPH_PARTS, append_event
from varuna_core.records.runfolder import RunFolder

MARKS = ("sign", "ending", "ended", "ordered", "running", "loaded", "stepped")
"""Points in time of a morph; each part of its cost is the time between two consecutive ones."""
MOST_BYTES = 1024 * 1024
"""Bytes of a rank's output in which its first step is looked for; beyond, a morph counts as over at
the start of its ranks."""
OLD_S = 120.0
LOOK_S = 1.0
"""Seconds between two looks at a script's output."""


class Cost:
    """Times, by the monotonic clock, at which the phases of the current morph began.

    A killed manager forgets these times, and that morph has no event.
    """

    def __init__(
        self, run: RunFolder, observer: NodeObserver, steps: Optional[Furthest] = None
    ) -> None:
        """`steps` reads the steps of a user's script, which does not report its start."""
        self._run, self._observer, self._steps = run, observer, steps
        self._look_at = 0.0
        self._marks: Dict[str, float] = {}
        self._before: Optional[Dict[str, str]] = None
        """Shape of the layout before the morph, and the morph's reason."""
        self._ordered = float("-inf")
        """The time at which the last attempt was ordered."""
        self.trained = -1
        """The last attempt that is known to have done a step."""

    @property
    def is_old(self) -> bool:
        """True if the attempt was ordered so long ago that its first step need be looked for only
        rarely: a script that prints no steps never shows one."""
        return time.monotonic() - self._ordered > OLD_S

    def mark(self, before: ManagerState, state: ManagerState) -> None:
        """Record the times at which the phases of a morph begin; called after each step of the
        state machine."""
        now = time.monotonic()
        if before.phase == state.phase:
            return
        self.look(before)  # an attempt may be over before anybody looked at its start
        if before.phase == RUNNING:
            self._write(before)  # it may never have come to a step
        if before.phase == JUDGING and self._before is not None and not self._before["reason"]:
            self._before["reason"] = state.why  # its ranks ended by themselves: the files told why
        if state.phase in (SAVING, STOPPING, JUDGING):
            self._marks.setdefault("ending", now)
        if state.phase == JUDGING:
            self._marks["ended"] = now
            self._marks["sign"] = self._compute_last_sign(state, self._marks["ending"])
            self._before = {"shape": self._describe(before.attempt), "reason": state.why}
        if state.phase == RUNNING:
            self._marks["ordered"] = self._ordered = now

    def look(self, state: ManagerState) -> bool:
        """Read the progress of the attempt's ranks; return True if they did their first step."""
        if state.phase not in (RUNNING, SAVING) or self.trained == state.attempt:
            return False
        attempt, plan = self._run.attempt(state.attempt), None
        if is_listed(attempt.go):
            self._marks.setdefault("running", time.monotonic())
            plan = read_attempt_plan(self._run, state.attempt)
        if plan is None:
            return False
        if self._steps is not None:
            if not self._has_step(self._steps, state.attempt):
                return False
        else:
            if self._says(state, 0, BEGIN):
                self._marks.setdefault("loaded", time.monotonic())
            if not self._says(state, plan.world - 1, FIRST_STEP):
                return False
            self._marks.setdefault("loaded", time.monotonic())
        self._marks["stepped"] = time.monotonic()
        self.trained = state.attempt
        self._write(state)
        return True

    def _has_step(self, steps: Furthest, attempt: int) -> bool:
        """Return True if a line of a script showed a step; the output is read only now and then."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        return steps.has_step(attempt)

    def _says(self, state: ManagerState, rank: int, words: str) -> bool:
        plan = read_attempt_plan(self._run, state.attempt)
        output = locate_output(self._run.attempt(state.attempt), plan, rank, "out")
        return is_listed(output.path) and words.encode() in output.read(MOST_BYTES)

    def _compute_last_sign(self, state: ManagerState, ending: float) -> float:
        """Return the last time at which all was known to be well: a lost node's last sign of life
        or the end of the first failed rank, as far as its node's clock can be trusted."""
        attempt = self._run.attempt(state.attempt)
        plan = read_attempt_plan(self._run, state.attempt)
        exits = [] if plan is None else read_exits(attempt, plan.world).values()
        failed = [item.ended for item in exits if item.code != 0 and not item.stopped]
        ages = [time.time() - min(failed)] if failed else []
        heard = [self._observer.find_last_sign(node) for node in state.gone]
        ages += [time.monotonic() - at for at in heard if at is not None]
        return max(self._ordered, min(ending, time.monotonic() - max(ages, default=0.0)))

    def _write(self, state: ManagerState) -> None:
        """Write the event of the morph, with the parts that are known."""
        marks, before = self._marks, self._before
        self._marks, self._before = {}, None
        if before is None or "running" not in marks:  # the first attempt of this job, or none
            return
        parts = {}
        for index, name in enumerate(MORPH_PARTS):
            begin, end = MARKS[index], MARKS[index + 1]
            if begin in marks and end in marks:
                parts[name] = round(marks[end] - marks[begin], 3)
        facts: Dict[str, Any] = {
            "from": before["shape"],
            "to": self._describe(state.attempt),
            "attempt": state.attempt,
            "nodes": [get_seat(node) for node in state.members],
            "iteration": self._read_start(state),
            "reason": before["reason"],
            **parts,
        }
        if "stepped" in marks:
            facts["pause_s"] = round(marks["stepped"] - marks["sign"], 3)
        with contextlib.suppress(OSError):
            append_event(self._run.morph_events, "morph", **facts)

    def _read_start(self, state: ManagerState) -> int:
        """Return the iteration at which the attempt began."""
        if self._steps is not None and state.whole < 0:
            return -1  # of a checkpoint that is the script's own
        return state.base

    def _describe(self, number: int) -> str:
        """Describe a layout as pipeline x data, and x tensor if layers are shared."""
        plan = read_attempt_plan(self._run, number)
        if plan is None:
            return "?"
        shape = f"{plan.pipeline} x {plan.data}"
        return shape if plan.tensor == 1 else f"{shape} x {plan.tensor}"

"""Manager (`morph manage`): owner of a run that may morph, beside its first node's batch script.

    files ──► NodeObserver ──► inputs ──► machine ──► state ──► manager.json ──► actions ──► files
                                                            │
                              a manager that was killed: ───┘ reads it, does its actions again

It decides nothing itself. The state lands before its actions are done, and each action may be done
twice, so it can be killed at any instruction; the batch script starts it again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from varuna_core.agent.closing import Scene, judge
from varuna_core.agent.processes.signals import Signals
from varuna_core.agent.restarts import describe_failure, explain_same, is_same
from varuna_core.morph.attempt import find_culprit, make_attempt, pick_nodes, read_held
from varuna_core.morph.cost import Cost
from varuna_core.morph.furthest import Furthest
from varuna_core.morph.machine import advance, begin, repeat
from varuna_core.morph.messages import (
    DONE,
    FAILED,
    LEFT,
    MOST_FRUITLESS,
    Action,
    AskToSave,
    CalledToEnd,
    CalledToLeave,
    End,
    Input,
    Judge,
    Judged,
    Rules,
    Saved,
    Start,
    StopRanks,
    Tick,
)
from varuna_core.morph.node_daemon import beat_s, poll_s
from varuna_core.morph.node_observer import NodeObserver, Sight
from varuna_core.morph.orders import (
    Orders,
    read_leave,
    read_presences,
    write_orders,
)
from varuna_core.records.checkpoints import find_fit
from varuna_core.records.exits import NODE_LOST, Outcome, read_exits, read_outcome, write_outcome
from varuna_core.records.morphing import (
    ENDED,
    RUNNING,
    SAVING,
    STOPPING,
    ManagerState,
    add_joins,
    get_seat,
    read_joins,
    read_state,
    write_state,
)
from varuna_core.records.nodes import FAIL, read_reports
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.record import append_event
from varuna_core.records.requests import read_signal, read_stop, write_signal, write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.training import TrainingFacts

SAVE_LOOK_S = 1.0
"""Between two looks at the folder of checkpoints."""
STOP_S = 120.0
"""Beyond the grace of ranks that are told to end."""
HOME_S = 5.0
"""For nodes to see that the run has ended before the batch script ends them."""
KEY = "manager-save"


class Manager:
    """The manager of one job of the run."""

    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        facts: TrainingFacts,
        session: str,
        heard: Sequence[str] = (),
        expected: Optional[int] = None,
    ) -> None:
        """`expected`: nodes that this job was given, where they may be fewer than it asked for."""
        assert plan.morphing is not None
        self._run, self._facts, self._session = run, facts, session
        self._asked = self._plan = plan
        self._num_joins = 0
        timing, limits = plan.timing, plan.morphing
        self._rules = Rules(
            min_nodes=limits.min_nodes,
            expected=min(expected or plan.num_nodes, plan.num_nodes),
            gather_s=timing.join_s,
            wait_s=timing.join_s,
            save_s=limits.save_s,
            stop_s=timing.grace_s + STOP_S,
            finish_s=limits.finish_s,
            may_requeue=limits.requeue,
            most_fruitless=MOST_FRUITLESS if plan.restarts is None else plan.restarts + 1,
            counts_steps=facts.is_own,
        )
        self._signals = Signals()
        self._observer = NodeObserver(timing.lost_s, beat_s(plan), poll_s(plan))
        self._saved = -1
        self._furthest = Furthest(run, plan)
        self._fit: set[Path] = set()
        """Checkpoints that had all their files when they were new, or when ranks last ended."""
        self._look_at = 0.0
        self._heard = [f"SIG{name}" for name in heard]
        """Names of signals that the machine is still to be told of."""
        self._cost = Cost(run, self._observer, self._furthest if facts.is_own else None)
        self._next_beat = 0.0
        self._widen()
        self._state = self._open()
        self._landed: Optional[ManagerState] = None
        self._land()

    def run(self) -> int:
        """0 once manager.json has the answer; the batch script reads it with `answer`."""
        self._do(repeat(self._state))
        while self._state.phase != ENDED:
            if self._is_replaced():
                self._say("the run went on in another job; this one ends")
                return 0
            self._tell(*self._read_inputs(), Tick())
            if self._cost.look(self._state) or time.monotonic() >= self._next_beat:
                with contextlib.suppress(OSError):  # the disk may be full for a while
                    self._write_orders()
            if self._state.phase != ENDED:
                self._signals.wait(poll_s(self._plan))
        self._see_home()
        return 0

    def _is_replaced(self) -> bool:
        """True if a later job owns the run: ours was given up, and then came back to life."""
        found = read_state(self._run.morph)
        return found is not None and found.session != self._session

    def _open(self) -> ManagerState:
        """The state of this job: its own from before a kill, or a new one after an earlier job."""
        self._run.morph.make()
        earlier = read_state(self._run.morph)
        if earlier is not None and earlier.session == self._session:
            return earlier
        number = max((item.number for item in self._run.attempts()), default=-1)
        if earlier is not None:
            number = max(number, earlier.attempt)
        for path in self._run.morph.leave(0).parent.glob("*.json"):
            path.unlink()
        saved, mark = self._find_saved(), -1
        if earlier is not None and self._facts.is_own and saved < 0:
            mark = self._furthest.find(earlier.attempt)  # that job may have come to no verdict
        state = begin(self._rules, time.monotonic(), earlier, saved, number, mark)
        return replace(state, session=self._session)

    # Inputs.

    def _read_inputs(self) -> List[Input]:
        said: List[Input] = []
        if self._signals.ending is not None:
            self._heard.append(self._signals.ending)
            self._signals.ending = None
        self._heard += [signal.Signals(number).name for number in self._signals.take_forwarded()]
        for name in self._heard:
            if name.startswith("SIGUSR"):
                said.append(CalledToLeave(f"{name}: the time limit or preemption is near"))
            else:
                said.append(CalledToEnd(f"{name} from the scheduler (cancel or time limit)"))
        self._heard = []
        return said + self._observer.observe(self._state, self._look(), time.monotonic())

    def _widen(self) -> None:
        """Seats that were given out since the last look."""
        joins = read_joins(self._run.morph)
        if len(joins) != self._num_joins:
            self._num_joins, self._plan = len(joins), add_joins(self._asked, joins)

    def _look(self) -> Sight:
        self._widen()
        attempt = self._run.attempt(self._state.attempt)
        is_ours = self._state.phase in (RUNNING, SAVING)
        stop = read_stop(attempt) if is_ours else None
        refused: Dict[int, str] = {}
        if stop is not None and stop["kind"] == "not-ready":
            seats = [get_seat(node) for node in self._state.members]
            for index, report in read_reports(attempt).items():
                texts = [f"{item.name}: {item.text}" for item in report.problems(FAIL)]
                if texts and index < len(seats):
                    refused[seats[index]] = "; ".join(texts)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + SAVE_LOOK_S
            self._saved = self._find_saved()
        presences = read_presences(self._run.morph, self._session)
        return Sight(
            presences={s: p for s, p in presences.items() if s < self._plan.num_nodes},
            stop=stop,
            refused=refused,
            leave=read_leave(self._run.morph),
            saved=self._saved,
        )

    def _find_saved(self) -> int:
        if self._facts.checkpoint_folder is None:
            return -1
        found = find_fit(self._run.path / self._facts.checkpoint_folder, self._fit)
        return -1 if found is None else found.iteration

    # The machine.

    def _tell(self, *said: Input) -> None:
        for one in said:
            before = self._state
            state, actions = advance(before, one, time.monotonic(), self._rules, self._choose)
            if state != before:
                self._cost.mark(before, state)
                self._state = state
                self._tell_left_out(state.left_out[len(before.left_out) :])
            if actions:
                self._land()
                self._do(actions)
        self._land()

    def _tell_left_out(self, texts: Sequence[str]) -> None:
        for text in texts:
            self._say(text)
            with contextlib.suppress(OSError):
                append_event(self._run.morph_events, "left-out", reason=text)

    def _choose(self, nodes: Sequence[str]) -> Tuple[str, ...]:
        return pick_nodes(self._plan, self._facts, nodes, read_held(self._run, self._session))

    def _land(self) -> None:
        """Before anything is done about it; once for all that was seen in one look: thousands of
        nodes may join in it."""
        if self._state != self._landed:
            write_state(self._run.morph, self._state)
            self._landed = self._state

    # Actions.

    def _do(self, actions: Sequence[Action]) -> None:
        """The orders tell of an attempt, so they come after its plan: once, after all the rest."""
        for action in actions:
            if isinstance(action, Start):
                seen = {"whole": self._state.whole, "saved": self._state.saved}
                make_attempt(self._run, self._plan, self._facts, action, self._session, **seen)
            elif isinstance(action, AskToSave):
                write_signal(self._run.attempt(action.attempt), "USR1", KEY)
            elif isinstance(action, StopRanks):
                self._stop(action)
            elif isinstance(action, End):
                self._conclude(action)
        self._write_orders()
        for action in actions:
            if isinstance(action, Judge):
                self._tell(self._judge(action.attempt))

    def _stop(self, action: StopRanks) -> None:
        attempt = self._run.attempt(action.attempt)
        attempt.make()
        if write_stop(attempt, "lost", NODE_LOST, action.reason):
            self._say(f"attempt {action.attempt} ends: {action.reason}")

    def _write_orders(self) -> None:
        state = self._state
        runs = state.phase in (RUNNING, SAVING, STOPPING)
        self._next_beat = time.monotonic() + beat_s(self._plan)
        write_orders(
            self._run.morph,
            Orders(
                session=self._session,
                attempt=state.attempt if runs else -1,
                nodes=state.members if runs else (),
                fenced=state.fenced,
                end=state.phase == ENDED,
                back=state.requeue,
                beat=round(time.time(), 3),
                ending=state.phase == STOPPING,
                trained=runs and self._cost.trained == state.attempt,
            ),
        )

    def _judge(self, number: int) -> Judged:
        attempt = self._run.attempt(number)
        self._fit.clear()
        self._saved = self._find_saved()
        self._tell(Saved(self._saved))
        outcome = judge(Scene(self._run, self._own_plan(attempt), attempt, 0))
        if self._state.gone and outcome.code != 0:  # whoever failed first lost them, and says less
            reason = "; ".join(dict.fromkeys((self._state.why, outcome.reason)))
            outcome = replace(outcome, code=NODE_LOST, reason=reason, culprit_rank=None)
        kind = FAILED
        if outcome.code == 0:
            kind = DONE if self._is_done(attempt) else LEFT
        if self._facts.is_own and self._saved < 0:
            self._tell(self._measure(attempt, has_left=kind == LEFT))
        self._write_outcome(attempt, outcome)
        culprit = self._find_culprit(attempt, outcome)
        repeats = self._explain_repeat(attempt, outcome) if kind == FAILED else ""
        return Judged(kind, outcome.code, outcome.reason, culprit, repeats)

    def _is_done(self, attempt: AttemptFolder) -> bool:
        """True where ranks that exited with 0 came to the end of the training.

        A built-in program has a checkpoint of its last step then. A script has left where it was
        asked to, and else is done; one that came to its end in that moment does so again, at once.
        """
        if self._facts.steps is not None and self._saved >= self._facts.steps:
            return True
        return self._facts.is_own and read_signal(attempt) is None

    def _measure(self, attempt: AttemptFolder, *, has_left: bool) -> Saved:
        """The progress of a script whose checkpoints are its own: its steps, as its output tells;
        and that it left when it was asked to, for then it saved."""
        mark = self._furthest.find(attempt.number)
        if has_left:
            mark = max(mark, self._state.mark + 1)
        return Saved(-1, mark)

    def _explain_repeat(self, attempt: AttemptFolder, outcome: Outcome) -> str:
        """Why this failure is that of the attempt before; empty where it is not, or may be."""
        if self._asked.restarts is None or self._asked.restart_same or self._state.asked:
            return ""
        before = self._run.attempt(attempt.number - 1)
        earlier = read_outcome(before)
        if earlier is None or earlier.culprit_rank is None or outcome.culprit_rank is None:
            return ""
        now = describe_failure(self._own_plan(attempt), attempt, outcome, read_stop(attempt))
        then = describe_failure(self._own_plan(before), before, earlier, read_stop(before))
        return explain_same(now) if is_same(now, then) else ""

    def _find_culprit(self, attempt: AttemptFolder, outcome: Outcome) -> str:
        plan, members = self._own_plan(attempt), self._state.members
        index = find_culprit(plan, read_exits(attempt, plan.world), outcome.missing_ranks)
        return members[index] if index is not None and index < len(members) else ""

    def _own_plan(self, attempt: AttemptFolder) -> Plan:
        return read_plan(attempt.plan) or self._plan

    def _write_outcome(self, attempt: AttemptFolder, outcome: Outcome) -> None:
        self._say(f"attempt {attempt.number}: code {outcome.code}: {outcome.reason}")
        with contextlib.suppress(OSError):  # a full disk must not end the manager
            write_outcome(attempt, outcome)
            facts = {"code": outcome.code, "reason": outcome.reason, "iteration": self._saved}
            append_event(self._run.morph_events, "ended", attempt=attempt.number, **facts)

    def _conclude(self, action: End) -> None:
        """The job's end, told as that of its last attempt, for whoever looks there; or of one that
        never started."""
        number = max(self._state.attempt, self._state.earlier + 1)
        attempt = self._run.attempt(number)
        attempt.make()
        was = read_outcome(attempt)
        blank = Outcome(action.code, action.reason, None, None, None, [], round(time.time(), 3))
        with contextlib.suppress(OSError):
            write_outcome(attempt, replace(was or blank, code=action.code, reason=action.reason))
            if action.requeue:
                append_event(self._run.morph_events, "requeued", reason=action.reason)
        what = "comes back" if action.requeue else f"ends with {action.code}"
        self._say(f"the job {what}: {action.reason}")

    def _see_home(self) -> None:
        """Wait a little for the nodes to go by themselves."""
        deadline = time.monotonic() + HOME_S
        while time.monotonic() < deadline:
            before = {s: p.count for s, p in read_presences(self._run.morph, self._session).items()}
            self._signals.wait(2 * beat_s(self._plan))
            after = {s: p.count for s, p in read_presences(self._run.morph, self._session).items()}
            if before == after:
                return

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"manager: {text}", file=sys.stderr, flush=True)

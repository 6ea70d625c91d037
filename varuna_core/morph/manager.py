"""Manager (`morph manage`): owner of a run that may morph, beside its first node's batch script.

    files ──► NodeObserver ──► inputs ──► machine ──► state ──► manager.json ──► actions ──► files
                                                            │
                              a manager that was killed: ───┘ reads it, does its actions again

Each start of a manager claims an epoch (records/morphing.py), and a manager that sees a later epoch
ends. Since a suspended manager may wake up at any instruction while another job owns the run, a
manager writes only to its own epoch's files, to attempts whose number it has claimed, and to the
log of events.

All decisions are the state machine's. The state is written before its actions are done, and each
action may be done twice, so the manager can be killed at any instruction; the batch script then
starts another one.
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
from varuna_core.agent.meeting.link import call_hub
from varuna_core.agent.processes.signals import Signals
from varuna_core.agent.restarts import describe_failure, explain_same, is_same
from varuna_core.facts import cause as facts
from varuna_core.facts.cause import EndCause
from varuna_core.facts.hang import OF_ONE_NODE
from varuna_core.facts.known import Evidence
from varuna_core.hang.signs import read_hang, write_cut
from varuna_core.morph.attempt import find_culprit, make_attempt, pick_nodes
from varuna_core.morph.cost import Cost
from varuna_core.morph.furthest import EPOCH, Furthest
from varuna_core.morph.links import FILE_S, Calm, ManagerLink
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
    RoomFound,
    Rules,
    Saved,
    Start,
    StopRanks,
    Taken,
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
from varuna_core.records.checkpoints import find_fit, find_full, list_full
from varuna_core.records.exits import (
    HUNG,
    NODE_LOST,
    Judgement,
    Outcome,
    conclude,
    end_of_stop,
    is_fallout,
    read_exits,
    read_judgement,
    read_outcome,
    write_judgement,
)
from varuna_core.records.files import describe_room
from varuna_core.records.morphing import (
    ENDED,
    GATHERING,
    RUNNING,
    SAVING,
    STOPPING,
    ManagerState,
    Replaced,
    add_joins,
    claim_attempt,
    claim_epoch,
    get_seat,
    read_joins,
    read_newest_epoch,
    read_state,
    write_state,
)
from varuna_core.records.nodes import FAIL, read_reports
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.record import NO_ROOM, append_event, count_cancels
from varuna_core.records.requests import (
    read_requests,
    read_signal,
    read_stop,
    write_signal,
    write_stop,
)
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.training import TrainingFacts

SAVE_LOOK_S = 1.0
"""Seconds between looks at the folder of checkpoints."""
REST_PER_TURN, MOST_REST_S = 4.0, 2.0
"""Pause of the manager after a pass of its loop while nothing changes or nodes gather: this
multiple of the duration of the pass, up to the given maximum."""
HOME_S = 5.0
"""Seconds for nodes to see that the run has ended, before the batch script ends them."""
KEY = "manager-save"
CANCELLED = "the run was cancelled"


class Manager:
    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        facts: TrainingFacts,
        session: str,
        heard: Sequence[str] = (),
        expected: Optional[int] = None,
    ) -> None:
        """`expected` is the number of nodes given to this job, if it may be fewer than asked for.

        Raises Replaced if a later session has the run.
        """
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
            stop_s=timing.grace_s + limits.stop_s,
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
        """Checkpoints that were complete when the manager first saw them, or when ranks last
        ended."""
        self._look_at = 0.0
        self._has_room = False
        self._heard = [f"SIG{name}" for name in heard]
        """Names of signals still to be passed to the machine."""
        self._cost = Cost(run, self._observer, self._furthest if facts.is_own else None)
        self._told_cut: Tuple[int, Tuple[int, ...]] = (-1, ())
        self._ordered_at = 0.0
        """The time at which the orders were last written."""
        self._widen()
        self._state = self._open()
        self._link = ManagerLink(run, plan, self._say)
        self._calm = Calm(run, plan, self._epoch)
        self._sight: Optional[Sight] = None
        """The last full view of the run folder."""
        self._landed: Optional[ManagerState] = None
        self._land()

    def run(self) -> int:
        """Run until the state says what the batch script should do next, which the script reads
        with the command `answer`; return 0."""
        try:
            self._link.open()
            self._do(repeat(self._state))
            self._lead()
        except Replaced:
            self._say("the run went on in another job; this one ends")
        else:
            self._see_home()
        finally:
            self._link.close()
        return 0

    def _lead(self) -> None:
        while self._state.phase != ENDED:
            began = time.monotonic()
            self._link.step()
            is_calm = self._is_calm()
            attempt = self._run.attempt(self._state.attempt)
            is_due = not is_calm or self._calm.must_look(attempt, time.monotonic())
            if is_due and self._is_replaced():
                raise Replaced
            self._tell(*self._read_inputs(looks=is_due), Tick())
            every_s = FILE_S if is_calm else beat_s(self._plan)
            has_stepped = is_due and self._cost.look(self._state)
            self._tell_cut(attempt)
            if has_stepped or time.monotonic() - self._ordered_at >= every_s:
                with contextlib.suppress(OSError):  # the disk may be full for a while
                    self._write_orders()
            self._link.beat()
            if self._state.phase == ENDED:
                return
            if is_calm or self._state.phase == GATHERING:
                self._rest(time.monotonic() - began)
            self._signals.wait(poll_s(self._plan), self._link.fds)

    def _rest(self, turn_s: float) -> None:
        """Serve only the connections for a while. Otherwise each sign of life of thousands of nodes
        would start a pass of the loop, and nodes that connect at once would wait for passes."""
        until = time.monotonic() + min(REST_PER_TURN * turn_s, MOST_REST_S)
        while (left_s := until - time.monotonic()) > 0 and not self._link.is_asked:
            self._signals.wait(left_s, self._link.fds)
            if self._signals.ending is not None:
                return
            self._link.step()

    def _tell_cut(self, attempt: AttemptFolder) -> None:
        """Tell the agents which members are cut off, while their files may still arrive."""
        if self._state.phase != RUNNING:
            return
        linked = self._link.list_seats()
        seats = [get_seat(node) for node in self._state.members]
        cut = tuple(i for i, seat in enumerate(seats) if seat not in linked)
        mark = (attempt.number, cut)
        if len(cut) < len(seats) and mark != self._told_cut:
            if cut or self._told_cut[0] == attempt.number:
                write_cut(attempt, cut)
            self._told_cut = mark

    def _is_calm(self) -> bool:
        """True while the ranks train, all nodes are connected, and none has asked the manager to
        read the run folder."""
        state = self._state
        if state.phase != RUNNING or self._link.is_asked:
            return False
        is_begun = self._cost.trained == state.attempt or self._cost.is_old
        return is_begun and self._link.is_complete(state) and not self._link.has_newcomer(state)

    def _is_replaced(self) -> bool:
        """Return True if a later job owns the run because this one was taken for lost."""
        return read_newest_epoch(self._run.morph) > self._epoch

    def _open(self) -> ManagerState:
        """Return this job's state: that of a killed manager, or a new one after an earlier job."""
        self._run.morph.make()
        self._epoch = claim_epoch(self._run.morph, self._session)
        call_hub(self._run.morph.link)  # a manager that lives on reads that it is not the last
        earlier = read_state(self._run.morph)
        if earlier is not None and earlier.session == self._session:
            return earlier
        is_over = earlier is not None and earlier.phase == ENDED and not earlier.requeue
        cancels = count_cancels(self._run) if is_over else earlier.cancels if earlier else 0
        number = max((item.number for item in self._run.attempts()), default=-1)
        if earlier is not None:
            number = max(number, earlier.attempt)
        for path in self._run.morph.leave(0).parent.glob("*.json"):
            if self._is_replaced():  # they may be for whoever came after us
                raise Replaced
            path.unlink(missing_ok=True)
        saved, mark = self._find_saved(), -1
        if earlier is not None and self._facts.is_own and saved < 0:
            mark = self._furthest.find(earlier.attempt)  # that job may have come to no verdict
        state = begin(self._rules, time.monotonic(), earlier, saved, number, mark)
        return replace(state, session=self._session, cancels=cancels)

    # Inputs.

    def _read_inputs(self, *, looks: bool = True) -> List[Input]:
        """Collect inputs for the state machine; without `looks`, use the run folder's last view."""
        said: List[Input] = []
        if self._signals.ending is not None:
            self._heard.append(self._signals.ending)
            self._signals.ending = None
        self._heard += [signal.Signals(number).name for number in self._signals.take_forwarded()]
        for name in self._heard:
            if name.startswith("SIGUSR"):
                said.append(CalledToLeave(f"{name}: the time limit or preemption is near"))
            else:
                reason = f"{name} from the scheduler (cancel or time limit)"
                said.append(CalledToEnd(reason))
        self._heard = []
        if self._state.room and self._has_room:
            self._has_room = False
            said.append(RoomFound())
        if looks or self._sight is None:
            self._sight = self._look()
            self._link.answer()
            if self._state.phase == GATHERING and self._is_cancelled():
                said.append(CalledToEnd(CANCELLED, EndCause.CANCELLED))
        present = self._link.merge(self._sight.presences, self._session)
        seats = range(self._plan.num_nodes)
        sight = self._sight._replace(
            presences={s: p for s, p in present.items() if s in seats}, closed=self._link.closed
        )
        return said + self._observer.observe(self._state, sight, time.monotonic())

    def _widen(self) -> None:
        """Add the seats that were given to joining jobs since the last call."""
        joins = read_joins(self._run.morph)
        if len(joins) != self._num_joins:
            self._num_joins, self._plan = len(joins), add_joins(self._asked, joins)

    def _look(self) -> Sight:
        self._widen()
        attempt = self._run.attempt(self._state.attempt)
        is_ours = self._state.phase in (RUNNING, SAVING)
        asked, stop = read_requests(attempt)
        self._link.tell_requests(attempt.number, asked, stop)
        stop = stop if is_ours else None
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
            self._has_room = bool(
                self._state.room and find_full(self._run.path, self._store) is None
            )
        linked = self._link.list_seats()
        return Sight(
            presences=read_presences(self._run.morph, self._session, besides=linked),
            stop=stop,
            refused=refused,
            leave=read_leave(self._run.morph),
            saved=self._saved,
            closed=self._link.closed,
        )

    def _is_cancelled(self) -> bool:
        """Return True once a cancel was requested; cancels before a restart by the user do not
        count."""
        return count_cancels(self._run) > self._state.cancels

    def _find_saved(self) -> int:
        if self._store is None:
            return -1
        found = find_fit(self._store, self._fit)
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
        return pick_nodes(self._plan, self._facts, nodes)

    def _land(self) -> None:
        """Write the state, before its actions are done and only once per poll, since thousands of
        nodes may join in one poll."""
        if self._state != self._landed:
            write_state(self._run.morph, self._epoch, self._state)
            self._landed = self._state

    # Actions.

    def _do(self, actions: Sequence[Action]) -> None:
        """Do the actions. Orders name an attempt, so they are written last, after its plan."""
        for action in actions:
            if isinstance(action, Start):
                if not self._claim(action.attempt):
                    self._tell(Taken(action.attempt))
                    continue
                make_attempt(self._run, self._plan, self._facts, action, saved=self._state.saved)
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

    def _claim(self, number: int) -> bool:
        if self._is_replaced():  # or a folder that nobody uses would look like the newest attempt
            raise Replaced
        return claim_attempt(self._run.attempt(number), self._epoch, self._session)

    def _stop(self, action: StopRanks) -> None:
        attempt = self._run.attempt(action.attempt)
        attempt.make()
        if write_stop(attempt, "lost", NODE_LOST, action.reason, cause=action.cause):
            self._say(f"attempt {action.attempt} ends: {action.reason}")

    def _write_orders(self) -> None:
        state = self._state
        runs = state.phase in (RUNNING, SAVING, STOPPING)
        self._ordered_at = time.monotonic()
        orders = Orders(
            session=self._session,
            attempt=state.attempt if runs else -1,
            nodes=state.members if runs else (),
            fenced=state.fenced,
            end=state.phase == ENDED,
            back=state.requeue,
            beat=round(time.time(), 3),
            ending=state.phase == STOPPING,
            trained=runs and self._cost.trained == state.attempt,
            epoch=self._epoch,
        )
        write_orders(self._run.morph, orders)
        self._link.tell_orders(orders)

    def _judge(self, number: int) -> Judged:
        attempt = self._run.attempt(number)
        self._fit.clear()
        self._saved = self._find_saved()
        self._tell(Saved(self._saved))
        judged = judge(Scene(self._run, self._own_plan(attempt), attempt, 0))
        if self._state.gone and judged.outcome.code != 0:
            judged = self._blame_gone(attempt, judged)  # whoever failed first lost them
        outcome = judged.outcome
        kind = FAILED
        if outcome.code == 0:
            kind = DONE if self._is_done(attempt) else LEFT
        if self._facts.is_own and self._saved < 0:
            self._tell(self._measure(attempt, has_left=kind == LEFT))
        self._write_judgement(attempt, judged)
        if self._is_cancelled():  # its ask to save came to ranks that were leaving
            self._tell(CalledToEnd(CANCELLED, EndCause.CANCELLED))
        full = self._find_full(number, judged.end) if kind == FAILED else ""
        if full:
            self._say(f"the next attempt waits for room in {full} ({describe_room(Path(full))})")
            with contextlib.suppress(OSError):
                facts = {"attempt": number, "folder": full}
                append_event(self._run.morph_events, NO_ROOM, **facts)
            return Judged(kind, outcome.code, outcome.reason, no_room=full)
        culprit = self._find_culprit(attempt, outcome)
        repeats = self._explain_repeat(attempt, outcome) if kind == FAILED else ""
        hang = read_hang(attempt) if judged.end.cause is EndCause.HANG else None
        # Again at the same step, on other nodes: then it is none of the node's.
        is_sure = hang is not None and hang.witness in OF_ONE_NODE and not repeats
        wants = outcome.code == HUNG and self._asked.hang_do == "requeue"
        return Judged(kind, outcome.code, outcome.reason, culprit, repeats, is_sure, wants)

    def _blame_gone(self, attempt: AttemptFolder, judged: Judgement) -> Judgement:
        """Return the judgement of an attempt that ended because nodes were lost: they are its
        cause. A rank that failed before becomes a note, unless its error only reports the
        lost peer."""
        stop = read_stop(attempt) or {}
        if stop.get("kind") == "lost":
            end = end_of_stop(stop)
        else:
            end = facts.End(EndCause.NODE_SILENT, facts.Actor.NODE)
        why = Evidence("manager", text=self._state.why)
        evidence = (why, *judged.end.evidence) if self._state.why else judged.end.evidence
        node = end.node or self._name_gone(attempt)
        end = replace(end, code=NODE_LOST, node=node, at=judged.end.at, evidence=evidence)
        found = conclude(end, judged.outcome.missing_ranks)
        rank, world = judged.end.rank, self._own_plan(attempt).world
        first = None if rank is None else read_exits(attempt, world).get(rank)
        is_echo = judged.end.cause is end.cause or (first is not None and is_fallout(first))
        return found if is_echo else found.with_note(judged.outcome.reason)

    def _name_gone(self, attempt: AttemptFolder) -> str:
        """Return the host of the node that the attempt lost last, the one that the state's `why` is
        about; empty if its agent left no report."""
        gone = frozenset(self._state.gone)
        node = next(node for node in reversed(self._state.fenced) if node in gone)
        report = read_reports(attempt).get(self._state.members.index(node))
        return "" if report is None else report.host

    def _find_full(self, number: int, end: facts.End) -> str:
        """Return the folder that is still too full for the run, if the attempt ended because a disk
        was full; else the folder that the ranks' errors name, unless the attempt before ended for
        that reason too. Empty if there is none."""
        lines = list_full(end)
        if not lines:
            return ""
        full = find_full(self._run.path, self._store)
        before = read_judgement(self._run.attempt(number - 1)) if number else None
        if full is None and (before is None or not list_full(before.end)):
            named = " ".join(lines)
            full = next((x for x in (self._store, self._run.path) if x and str(x) in named), None)
        return "" if full is None else str(full)

    @property
    def _store(self) -> Optional[Path]:
        folder = self._facts.checkpoint_folder
        return None if folder is None else self._run.path / folder

    def _is_done(self, attempt: AttemptFolder) -> bool:
        """Return True if ranks that exited with 0 reached the end of the training.

        A built-in program has reached the end if it has a checkpoint of its last step, and a script
        if it printed the last step that its conf names. Any other script counts as done unless it
        was asked to leave; if it was asked and was done nevertheless, it will exit again at once.
        """
        steps, mark = self._facts.steps, self._saved
        if self._facts.is_own and (printed := self._furthest.find(attempt.number)) < EPOCH:
            mark = max(mark, printed)
        if steps is not None and mark >= steps:
            return True
        return self._facts.is_own and read_signal(attempt) is None

    def _measure(self, attempt: AttemptFolder, *, has_left: bool) -> Saved:
        """Return the progress of a script with its own checkpoints: the last step that it printed,
        or one step more than before if it left when asked to, since it saved then."""
        mark = self._furthest.find(attempt.number)
        if has_left:
            mark = max(mark, self._state.mark + 1)
        return Saved(-1, mark)

    def _explain_repeat(self, attempt: AttemptFolder, outcome: Outcome) -> str:
        """Return why this failure repeats that of the attempt before; empty if it may not."""
        if self._asked.restart_same or self._state.asked:
            return ""
        before = self._run.attempt(attempt.number - 1)
        earlier = read_outcome(before)
        if earlier is None:
            return ""
        if not earlier.code == outcome.code == HUNG and (
            self._asked.restarts is None or None in (earlier.culprit_rank, outcome.culprit_rank)
        ):
            return ""
        now = describe_failure(self._own_plan(attempt), attempt, outcome, read_stop(attempt))
        then = describe_failure(self._own_plan(before), before, earlier, read_stop(before))
        return explain_same(now) if is_same(now, then) else ""

    def _find_culprit(self, attempt: AttemptFolder, outcome: Outcome) -> str:
        plan, members = self._own_plan(attempt), self._state.members
        index = find_culprit(plan, read_exits(attempt, plan.world), outcome.missing_ranks)
        if outcome.code == HUNG:
            hosts = {report.host: at for at, report in read_reports(attempt).items()}
            hang = read_hang(attempt)
            index = None if hang is None else hosts.get(hang.node)
        return members[index] if index is not None and index < len(members) else ""

    def _own_plan(self, attempt: AttemptFolder) -> Plan:
        return read_plan(attempt.plan) or self._plan

    def _write_judgement(self, attempt: AttemptFolder, judged: Judgement) -> None:
        outcome = judged.outcome
        self._say(f"attempt {attempt.number}: code {outcome.code}: {outcome.reason}")
        with contextlib.suppress(OSError):  # a full disk must not end the manager
            write_judgement(attempt, judged)
            facts = {"code": outcome.code, "reason": outcome.reason, "iteration": self._saved}
            append_event(self._run.morph_events, "ended", attempt=attempt.number, **facts)

    def _conclude(self, action: End) -> None:
        """Record the job's end as that of its last attempt, or of one that never started."""
        number = max(self._state.attempt, self._state.earlier + 1)
        while not self._claim(number):
            number += 1
        attempt = self._run.attempt(number)
        why = Evidence("manager", text=action.reason)
        blank = facts.End(action.cause, code=action.code, at=round(time.time(), 3), evidence=(why,))
        judged = read_judgement(attempt)
        was = conclude(blank, []) if judged is None else judged.with_note(action.note)
        end = replace(was.end, code=action.code)
        outcome = replace(was.outcome, code=action.code, reason=action.reason)
        with contextlib.suppress(OSError):
            write_judgement(attempt, Judgement(end, outcome))
            if action.requeue:
                append_event(self._run.morph_events, "requeued", reason=action.reason)
        what = "comes back" if action.requeue else f"ends with {action.code}"
        self._say(f"the job {what}: {action.reason}")

    def _see_home(self) -> None:
        """Wait up to HOME_S for the daemons of the nodes to end by themselves."""
        deadline = time.monotonic() + HOME_S
        while time.monotonic() < deadline:
            before = self._count_signs()
            self._signals.wait(2 * beat_s(self._plan))
            if self._count_signs() == before:
                return

    def _count_signs(self) -> Dict[int, int]:
        self._link.step()
        files = read_presences(self._run.morph, self._session)
        return {seat: item.count for seat, item in self._link.merge(files, self._session).items()}

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"manager: {text}", file=sys.stderr, flush=True)

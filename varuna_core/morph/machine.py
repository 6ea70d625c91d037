"""State machine of a run whose nodes come, go and fail. Pure: inputs in, state and actions out.

                    all are here, or a plan fits those that are after gather_s
      ┌► GATHERING ───────────────────────────────────────────────► RUNNING ─────────────┐
      │      │ nothing fits for wait_s, called to end               │  │ nodes joined, one│
      │      ▼                                                      │  │ or all are to go │
      │    ENDED ◄── done, called to end or leave,                  │  ▼                  │
      │      ▲       too many attempts without a new checkpoint     │ SAVING ─────────────┤
      │      │                                     a node lost,     ▼  │ save_s is over    │
      └── JUDGING ◄── all have ended or are ── a rank failed ► STOPPING◄┘                  │
             ▲        fenced, at stop_s the latest                                         │
             └────────────────────── ranks of all nodes ended by themselves ──────────────┘

There is one attempt at a time: the next one starts from GATHERING, which comes after JUDGING, when
each node of the last attempt has ended its ranks or is fenced. No input raises an exception: an
input that does not fit the phase (a late message of a fenced node) changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, List, Optional, Sequence, Tuple

from varuna_core.agent.setup.site import STOPPED
from varuna_core.facts.cause import EndCause
from varuna_core.morph.messages import (
    DONE,
    LEFT,
    Action,
    AskedToLeave,
    AskToSave,
    CalledToEnd,
    CalledToLeave,
    End,
    Fence,
    Input,
    Joined,
    Judge,
    Judged,
    Lost,
    RankFailed,
    RanksEnded,
    RoomFound,
    Rules,
    Saved,
    Start,
    StopRanks,
    Taken,
)
from varuna_core.records.exits import NODE_LOST
from varuna_core.records.morphing import (
    END,
    ENDED,
    GATHERING,
    JUDGING,
    MORPH,
    REQUEUE,
    RUNNING,
    SAVING,
    STOPPING,
    ManagerState,
    get_seat,
)

ATTEMPTING = (RUNNING, SAVING, STOPPING)
"""Phases in which ranks may run."""

_WEIGHT = (MORPH, REQUEUE, END)

Choose = Callable[[Sequence[str]], Tuple[str, ...]]
"""Function from available nodes to those that the next attempt would use; empty if no plan fits."""
Step = Tuple["ManagerState", List[Action]]


def begin(
    rules: Rules,
    now: float,
    earlier: Optional[ManagerState],
    saved: int,
    attempt: int,
    mark: int = -1,
) -> ManagerState:
    """Return a job's first state. `earlier` is the state that the run's previous job left.

    If that job reached no verdict (its first node was lost), its last attempt counts like others,
    and so does its progress: `saved`, or `mark` for a script's steps.
    """
    fruitless, whole = 0, saved
    if earlier is not None:
        fruitless = earlier.fruitless
        if earlier.phase in (*ATTEMPTING, JUDGING):
            is_further = saved > earlier.base or mark > earlier.base_mark
            fruitless = 0 if is_further else fruitless + 1
        elif earlier.phase == ENDED and not earlier.requeue:
            fruitless = 0  # it was over, and a person started it again
        saved, mark = max(saved, earlier.saved), max(mark, earlier.mark)
    return ManagerState(
        attempt=attempt,
        earlier=attempt,
        saved=saved,
        whole=whole,
        base=saved,
        mark=mark,
        base_mark=mark,
        fruitless=fruitless,
        gather_until=now + rules.gather_s,
        deadline=now + max(rules.gather_s, rules.wait_s),
    )


def advance(state: ManagerState, said: Input, now: float, rules: Rules, choose: Choose) -> Step:
    """Return the state after the input `said` at time `now`, and the actions to take, in order."""
    if state.phase == ENDED:
        return state, []
    state, actions = _apply_input(state, said, now, rules)
    state, more = _apply_time(state, now, rules, choose)
    return state, actions + more


def repeat(state: ManagerState) -> List[Action]:
    """Return the actions that a killed manager may have left undone: all that the state implies."""
    if state.phase == ENDED:
        return [End(state.code, state.why, state.requeue)]
    found: List[Action] = [Fence(node) for node in state.fenced]
    if state.phase in (RUNNING, SAVING):
        found.append(Start(state.attempt, state.members))
    if state.phase == SAVING:
        found.append(AskToSave(state.attempt))
    if state.phase == STOPPING:
        found.append(StopRanks(state.attempt, state.why))
    if state.phase == JUDGING:
        found.append(Judge(state.attempt))
    return found


def _apply_input(state: ManagerState, said: Input, now: float, rules: Rules) -> Step:
    if isinstance(said, Joined):
        new = {*said.nodes}.difference(state.nodes, state.fenced)
        state = replace(state, nodes=tuple(sorted((*state.nodes, *new))))
        if new and state.phase == RUNNING:
            state = replace(state, grow_at=now + rules.settle_s)
        return state, []
    if isinstance(said, Lost):
        return _lose(state, said, now, rules)
    if isinstance(said, AskedToLeave):
        return _let_go(state, said, now, rules)
    if isinstance(said, (RanksEnded, RankFailed)) and said.attempt != state.attempt:
        return state, []  # seen in the same look as the end of its attempt, and told after it
    if isinstance(said, RanksEnded):
        ended = {*said.nodes}.intersection(state.living)
        if state.phase not in ATTEMPTING or not ended:
            return state, []
        if state.phase == RUNNING and state.deadline is None and rules.finish_s:
            state = replace(state, deadline=now + rules.finish_s)
        return replace(state, ended=(*state.ended, *sorted(ended))), []
    if isinstance(said, RankFailed):
        return _stop(state, said.reason, now, rules)
    if isinstance(said, CalledToLeave):
        state = replace(state, after=_weightier(state.after, REQUEUE))
        if state.phase == GATHERING:
            return _retreat(state, state.code or STOPPED, said.reason, rules, said.reason)
        return _ask_to_save(state, said.reason, now, rules)
    if isinstance(said, CalledToEnd):
        state = replace(state, after=END)
        if state.phase == GATHERING:
            return _end(state, state.code or STOPPED, said.reason, rules, cause=said.cause)
        return _stop(state, said.reason, now, rules, said.cause)
    if isinstance(said, Saved):
        saved, mark = max(state.saved, said.iteration), max(state.mark, said.mark)
        return replace(state, saved=saved, whole=said.iteration, mark=mark), []
    if isinstance(said, Taken) and (state.phase, state.attempt) == (RUNNING, said.attempt):
        state = replace(state, attempt=state.attempt + 1)
        return state, [Start(state.attempt, state.members)]
    if isinstance(said, Judged) and state.phase == JUDGING:
        return _conclude(state, said, now, rules)
    if isinstance(said, RoomFound) and state.room:
        return replace(state, room="", gather_until=now, deadline=now + rules.wait_s), []
    return state, []  # a tick, or the echo of an attempt that is over


def _apply_time(state: ManagerState, now: float, rules: Rules, choose: Choose) -> Step:
    """Return the next state and the actions that are due at the time `now`: at a passed deadline,
    at the time to grow, when no node of the attempt is left, or when a new one can start."""
    is_late = state.deadline is not None and now >= state.deadline
    actions: List[Action] = []
    if state.phase in (RUNNING, SAVING) and is_late and state.living:
        reason = state.why or f"{len(state.ended)} nodes have ended, {len(state.living)} go on"
        state, actions = _stop(state, reason, now, rules)
    elif state.phase == STOPPING and is_late:
        for node in state.living:
            actions.append(Fence(node))
            state = _without(state, node)
            why = f"node {get_seat(node)} did not end its ranks in {rules.stop_s:g} s"
            state = replace(state, why=why)
    elif state.phase == RUNNING and state.grow_at is not None and now >= state.grow_at:
        state, actions = _grow(state, now, rules, choose)
    if state.phase in ATTEMPTING and not state.living:
        state = replace(state, phase=JUDGING, deadline=None)
        return state, [*actions, Judge(state.attempt)]
    if state.phase == GATHERING and not state.room:
        return _try_to_start(state, now, rules, choose, is_late=is_late)
    return state, actions


def _try_to_start(
    state: ManagerState, now: float, rules: Rules, choose: Choose, *, is_late: bool
) -> Step:
    if state.fruitless >= rules.most_fruitless:
        return _give_up(state, rules)
    free = state.free
    chosen: Tuple[str, ...] = ()
    if len(free) >= rules.min_nodes and (len(free) >= rules.expected or now >= state.gather_until):
        chosen = choose(free)
    if len(chosen) >= max(rules.min_nodes, 1):
        state = replace(
            state,
            phase=RUNNING,
            attempt=state.attempt + 1,
            members=chosen,
            ended=(),
            after=MORPH,
            asked=False,
            grow_at=None,
            why="",
            base=state.saved,
            base_mark=state.mark,
            deadline=None,
        )
        return state, [Start(state.attempt, chosen)]
    if not is_late:
        return state, []
    here = "1 node is here" if len(free) == 1 else f"{len(free)} nodes are here"
    if len(free) < rules.min_nodes:
        what = f"{here}, at least {rules.min_nodes} are needed"
    else:
        what = f"{here}, but no plan for {rules.min_nodes} or more of them fits"
    safe = f"; the checkpoint of iteration {state.whole} is safe" if state.whole >= 0 else ""
    last = f"; before that: {state.why}" if state.why else ""
    note = f"{what}{safe}"
    state = replace(state, after=_weightier(state.after, REQUEUE))
    return _retreat(state, state.code or NODE_LOST, f"{note}{last}", rules, note)


def _grow(state: ManagerState, now: float, rules: Rules, choose: Choose) -> Step:
    """Start a morph if the next attempt would have more nodes and no ranks are ending."""
    state = replace(state, grow_at=None)
    gain = len(choose(state.free)) - len(state.members)
    if gain <= 0 or state.ended or state.deadline is not None:
        return state, []
    return _ask_to_save(
        state, "1 more node is here" if gain == 1 else f"{gain} more nodes are here", now, rules
    )


def _lose(state: ManagerState, said: Lost, now: float, rules: Rules) -> Step:
    if said.node in state.fenced:
        return state, []
    is_member = state.phase in ATTEMPTING and said.node in state.living
    state = _without(state, said.node)
    actions: List[Action] = [Fence(said.node)]
    if is_member:
        state, more = _stop(state, said.reason, now, rules, said.cause)
        actions += more
        state = replace(state, why=said.reason)  # others failed because of it, if they did first
    return state, actions


def _let_go(state: ManagerState, said: AskedToLeave, now: float, rules: Rules) -> Step:
    node = said.node
    if node not in state.nodes or node in state.leaving:
        return state, []
    reason = f"node {node.partition('/')[0]} is to leave"
    if said.why:  # nobody's wish, so the run's own limits count
        if len(state.free) - 1 < rules.min_nodes:
            return state, []
        reason = f"node {node.partition('/')[0]} is left out: {said.why}"
        state = replace(state, left_out=(*state.left_out, reason))
    if node not in state.living:
        return _without(state, node), [Fence(node)]
    state = replace(state, leaving=(*state.leaving, node))
    return _ask_to_save(state, reason, now, rules)


def _ask_to_save(state: ManagerState, reason: str, now: float, rules: Rules) -> Step:
    if state.phase != RUNNING:  # nobody runs, is asked already, or is ending
        return state, []
    state = replace(state, phase=SAVING, asked=True, why=reason, deadline=now + rules.save_s)
    return state, [AskToSave(state.attempt)]


def _stop(
    state: ManagerState,
    reason: str,
    now: float,
    rules: Rules,
    cause: Optional[EndCause] = None,
) -> Step:
    if state.phase not in (RUNNING, SAVING):
        return state, []
    state = replace(state, phase=STOPPING, why=reason, deadline=now + rules.stop_s)
    return state, [StopRanks(state.attempt, reason, cause)]


def _conclude(state: ManagerState, said: Judged, now: float, rules: Rules) -> Step:
    """Decide what follows after an attempt is over."""
    state = replace(state, code=said.code, why=said.reason)
    is_further = state.saved > state.base or state.mark > state.base_mark
    counts = not said.no_room
    state = replace(state, fruitless=0 if is_further else state.fruitless + counts)
    if said.wants_requeue and not said.repeats:
        state = replace(state, after=_weightier(state.after, REQUEUE))
    # Who left without our asking was asked by the user.
    is_free = state.after == MORPH and not (state.asked or state.leaving)
    if said.outcome == DONE or state.after == END or (said.outcome == LEFT and is_free):
        return _end(replace(state, after=END), said.code, said.reason, rules)
    if state.fruitless >= rules.most_fruitless:
        return _give_up(state, rules)
    if state.after == REQUEUE:
        return _end(state, said.code, said.reason, rules)
    num_left_out = len(state.left_out)
    state = _leave_out(state, said, rules)
    # On the same nodes it would fail again.
    if said.repeats and len(state.left_out) == num_left_out:
        return _end(
            replace(state, after=END),
            said.code,
            f"{said.reason}; {said.repeats}",
            rules,
            said.repeats,
        )
    actions: List[Action] = []
    for node in state.leaving:
        if node in state.nodes:
            state = _without(state, node)
            actions.append(Fence(node))
    state = replace(
        state,
        phase=GATHERING,
        members=(),
        ended=(),
        leaving=(),
        room=said.no_room,
        gather_until=now,
        deadline=now + rules.wait_s,
    )
    return state, actions


def _leave_out(state: ManagerState, said: Judged, rules: Rules) -> ManagerState:
    """Exclude a node from the next attempt if the other nodes suffice: a node at fault in two
    failures in a row without a new checkpoint, or in one failure in which a rank on the node was
    stopped or dead."""
    suspect = said.culprit if state.fruitless or said.is_sure else ""
    rest = [node for node in state.nodes if node not in (*state.leaving, suspect)]
    is_known = said.is_sure or suspect == state.suspect
    if not suspect or not is_known or len(rest) < rules.min_nodes:
        return replace(state, suspect=suspect)
    why = "its ranks failed in two attempts in a row, without a new checkpoint; the last time: "
    why = f"{'' if said.is_sure else why}{said.reason}"
    text = f"node {suspect.partition('/')[0]} is left out: {why}"
    leaving, left_out = (*state.leaving, suspect), (*state.left_out, text)
    return replace(state, suspect="", leaving=leaving, left_out=left_out)


def _retreat(state: ManagerState, code: int, reason: str, rules: Rules, note: str) -> Step:
    """End the job before its ranks have run. It counts toward the limit of attempts without a new
    checkpoint, except after a lack of disk space."""
    state = replace(state, fruitless=state.fruitless + (not state.room))
    if state.fruitless >= rules.most_fruitless:
        state = replace(state, after=END)
    return _end(state, code, reason, rules, note)


def _give_up(state: ManagerState, rules: Rules) -> Step:
    last = f"; the last one: {state.why}" if state.why else ""
    number = "1 attempt" if state.fruitless == 1 else f"{state.fruitless} attempts"
    what = "progress" if rules.counts_steps and state.whole < 0 else "new checkpoint"
    note = f"no {what} in {number}"
    code = state.code or NODE_LOST
    return _end(replace(state, after=END), code, f"{note}{last}", rules, note)


def _end(
    state: ManagerState,
    code: int,
    reason: str,
    rules: Rules,
    note: str = "",
    cause: EndCause = EndCause.NOT_MET,
) -> Step:
    requeue = state.after == REQUEUE and rules.may_requeue
    state = replace(
        state, phase=ENDED, code=code, why=reason, requeue=requeue, members=(), deadline=None
    )
    return state, [End(code, reason, requeue, cause, note)]


def _without(state: ManagerState, node: str) -> ManagerState:
    nodes = tuple(item for item in state.nodes if item != node)
    return replace(state, nodes=nodes, fenced=(*state.fenced, node))


def _weightier(first: str, second: str) -> str:
    return max(first, second, key=_WEIGHT.index)

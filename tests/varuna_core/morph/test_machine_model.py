"""The state machine of morphing against a model: nodes and jobs that come and go, a clock, lost
managers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.varuna_core.morph.test_machine import RULES, choose
from varuna_core.morph.machine import advance, begin, repeat
from varuna_core.morph.messages import (
    DONE,
    FAILED,
    LEFT,
    Action,
    AskedToLeave,
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
    Saved,
    Start,
    Tick,
)
from varuna_core.records.morphing import (
    ENDED,
    GATHERING,
    JUDGING,
    RUNNING,
    SAVING,
    STOPPING,
    parse_state,
)


class Cluster(RuleBasedStateMachine):
    """Nodes that come, go and fall silent, and a manager that may be killed at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.rules, self.now = RULES, 0.0
        self.state = begin(self.rules, 0.0, None, -1, -1)
        self.keys = 0
        self.nodes: list[str] = []
        """Nodes that are there, whatever the manager thinks."""
        self.busy: dict[str, int] = {}
        """Nodes whose ranks run, and the attempt."""
        self.fenced: set[str] = set()
        self.attempts: list[int] = []
        self.saved = -1
        self.barren = 0
        """Starts since the last new checkpoint."""
        self.judged_done = False
        self.answer: tuple[str, int] = (FAILED, 1)

    def tell(self, said: Input) -> None:
        before = self.state
        self.state, actions = advance(before, said, self.now, self.rules, choose)
        self.obey(actions)

    def obey(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Fence):
                self.fenced.add(action.node)
            elif isinstance(action, Start):
                self.start(action)
            elif isinstance(action, Judge):
                assert not set(self.busy) - self.fenced
                if self.saved > self.state.saved:
                    self.tell(Saved(self.saved))
                outcome, code = self.answer
                self.judged_done = outcome == DONE
                self.tell(Judged(outcome, code, "judged"))
                if self.judged_done:
                    assert self.state.phase == ENDED and not self.state.requeue
            elif isinstance(action, End):
                assert action.reason or action.code == 0
                self.busy.clear()

    def start(self, action: Start) -> None:
        if self.attempts and action.attempt == self.attempts[-1]:
            return  # said again by a manager that was killed
        assert not self.attempts or action.attempt > self.attempts[-1]
        assert not set(self.busy) - self.fenced, "two attempts at once"
        assert len(action.nodes) >= self.rules.min_nodes
        assert not set(action.nodes) & self.fenced
        self.attempts.append(action.attempt)
        self.barren += 1
        assert self.barren <= self.rules.most_fruitless, "a loop without progress"
        self.busy = {node: action.attempt for node in action.nodes if node in self.nodes}

    @rule(seat=st.integers(0, 9))
    def join(self, seat: int) -> None:
        """Seats from `expected` on are those of jobs that joined."""
        self.keys += 1
        name = f"{seat}/{self.keys}"
        for old in [node for node in self.nodes if node.startswith(f"{seat}/")]:
            self.nodes.remove(old)
            self.tell(Lost(old, "replaced"))
        self.nodes.append(name)
        self.tell(Joined((name,)))

    @rule()
    def fill(self) -> None:
        """An agent in each seat that is empty, as when a job starts."""
        for seat in range(RULES.expected):
            if not any(node.startswith(f"{seat}/") for node in self.nodes):
                self.join(seat)

    @rule(job=st.sampled_from([range(4, 6), range(6, 9)]), are_heard=st.lists(st.booleans()))
    def join_as_job(self, job: range, are_heard: list[bool]) -> None:
        """Its nodes come one by one, and the manager may look in between."""
        for seat, is_heard in zip(job, are_heard, strict=False):
            self.join(seat)
            if is_heard:
                self.pass_time(1.0)

    @rule(job=st.sampled_from([range(4, 6), range(6, 9)]), asked=st.booleans())
    def end_job(self, job: range, asked: bool) -> None:
        """A job that joined is cancelled, or asked to leave as a whole."""
        for node in self.state.nodes:
            if int(node.partition("/")[0]) not in job:
                continue
            if asked:
                self.tell(AskedToLeave(node))
            else:
                self.busy.pop(node, None)
                if node in self.nodes:
                    self.nodes.remove(node)
                self.tell(Lost(node, "its job was cancelled"))

    @precondition(lambda self: self.fenced)
    @rule(data=st.data())
    def speak_late(self, data: st.DataObject) -> None:
        """A node that was cut off and fenced is heard again."""
        node = data.draw(st.sampled_from(sorted(self.fenced)))
        self.tell(Joined((node,)))
        self.tell(RanksEnded((node,), self.state.attempt))

    @precondition(lambda self: self.busy)
    @rule()
    def crash(self) -> None:
        """A rank fails and all nodes end theirs."""
        self.fail()
        while self.busy:
            node = min(self.busy)
            self.tell(RanksEnded((node,), self.busy.pop(node)))
            if node in self.busy:  # the next attempt has begun
                break

    @rule(data=st.data(), is_dead=st.booleans())
    def lose(self, data: st.DataObject, is_dead: bool) -> None:
        if self.state.nodes:
            node = data.draw(st.sampled_from(self.state.nodes))
            if is_dead:
                self.busy.pop(node, None)
                if node in self.nodes:
                    self.nodes.remove(node)
            self.tell(Lost(node, "silent"))

    @rule(data=st.data())
    def ask_to_leave(self, data: st.DataObject) -> None:
        if self.state.nodes:
            self.tell(AskedToLeave(data.draw(st.sampled_from(self.state.nodes))))

    @rule(data=st.data())
    def ask_a_slow_one_to_leave(self, data: st.DataObject) -> None:
        if self.state.nodes:
            before = self.state
            node = data.draw(st.sampled_from(before.nodes))
            self.tell(Tick())
            enough = len(self.state.free) > self.rules.min_nodes
            is_new = node in self.state.free
            told = self.state.left_out
            self.tell(AskedToLeave(node, "it is slow"))
            if is_new and self.state.phase != ENDED:
                assert (len(self.state.left_out) > len(told)) == enough

    @rule(data=st.data(), outcome=st.sampled_from([DONE, LEFT, FAILED]))
    def end_ranks(self, data: st.DataObject, outcome: str) -> None:
        self.answer = (outcome, 0 if outcome != FAILED else 1)
        if self.busy:
            node = data.draw(st.sampled_from(sorted(self.busy)))
            self.tell(RanksEnded((node,), self.busy.pop(node)))

    @rule()
    def fail(self) -> None:
        self.answer = (FAILED, 1)
        self.tell(RankFailed("a rank failed", self.state.attempt))

    @precondition(lambda self: self.state.attempt >= 0)
    @rule(data=st.data())
    def tell_of_earlier_attempt(self, data: st.DataObject) -> None:
        """What was seen with the end of an attempt, and comes when the next one has begun."""
        number = data.draw(st.integers(-1, self.state.attempt - 1))
        self.tell(Tick())
        before = self.state
        self.tell(RankFailed("a rank failed", number))
        for node in self.state.members:
            self.tell(RanksEnded((node,), number))
        assert self.state.living == before.living and self.state.phase == before.phase

    @precondition(lambda self: self.busy)
    @rule(heard=st.booleans())
    def save(self, heard: bool) -> None:
        self.saved += 1
        self.barren = 0
        if heard:
            self.tell(Saved(self.saved))

    @rule(said=st.sampled_from([CalledToLeave("preempted"), CalledToEnd("cancelled")]))
    def call(self, said: Input) -> None:
        self.tell(said)

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    @rule()
    def kill_manager(self) -> None:
        """It comes back with what landed, and does all of it again."""
        value = json.loads(json.dumps(asdict(self.state)))
        found = parse_state(value)
        assert found == self.state
        self.obey(repeat(found))

    @precondition(lambda self: self.state.phase != ENDED or self.state.requeue)
    @rule(is_lost=st.booleans())
    def come_back(self, is_lost: bool) -> None:
        """The job is requeued; or its first node is lost with the batch script, and then it is."""
        if self.state.phase != ENDED and not is_lost:
            return
        self.busy, self.nodes = {}, []
        self.fenced = set()  # who was in the session before is not heard in this one
        self.now += 100
        number = max(self.attempts, default=-1)
        self.state = begin(self.rules, self.now, self.state, self.saved, number)

    @invariant()
    def no_checkpoint_is_forgotten(self) -> None:
        assert self.state.saved <= self.saved
        assert self.state.base <= self.state.saved

    @invariant()
    def what_joined_is_used_or_too_little(self) -> None:
        state = self.state
        if state.phase == RUNNING and state.deadline is None and state.grow_at is None:
            assert len(choose(state.free)) <= len(state.members)
        if state.phase == RUNNING and state.grow_at is not None:
            assert state.grow_at <= self.now + self.rules.settle_s

    @invariant()
    def phases_hold_what_they_say(self) -> None:
        state = self.state
        if state.phase in (GATHERING, ENDED, JUDGING):
            assert not state.living or state.phase == JUDGING
        if state.phase in (SAVING, STOPPING, GATHERING):
            assert state.deadline is not None
        assert not set(state.nodes) & set(state.fenced)

    @invariant()
    def every_wait_has_an_end(self) -> None:
        """With nothing but time, all but a training that runs well comes to an end."""
        state, now = self.state, self.now
        for _ in range(30):
            if state.phase == ENDED or (state.phase == RUNNING and state.deadline is None):
                return
            now = max(now, state.deadline or now) + 0.001
            said: Input = Judged(FAILED, 1, "x") if state.phase == JUDGING else Tick()
            state, _ = advance(state, said, now, self.rules, choose)
        raise AssertionError(f"stuck in {state}")


Cluster.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase

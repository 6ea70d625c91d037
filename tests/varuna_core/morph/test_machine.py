"""The state machine of morphing: stories, and hypothesis against a model of nodes and a clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from varuna_core.morph.machine import (
    ENDED,
    GATHERING,
    JUDGING,
    RUNNING,
    SAVING,
    STOPPING,
    State,
    advance,
    begin,
    repeat,
)
from varuna_core.morph.manager import parse_state
from varuna_core.morph.words import (
    DONE,
    FAILED,
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
    Rules,
    Saved,
    Start,
    StopRanks,
    Tick,
)

RULES = Rules(
    min_nodes=2,
    expected=4,
    gather_s=10,
    wait_s=60,
    save_s=30,
    stop_s=20,
    finish_s=15,
    may_requeue=True,
)
NODES = ("0/a", "1/b", "2/c", "3/d")


def choose(nodes: Sequence[str]) -> tuple[str, ...]:
    """Three nodes make two: a plan that leaves one over."""
    return tuple(nodes[: {3: 2}.get(len(nodes), len(nodes))])


class Story:
    """Inputs one after the other, and what came of them."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules, self.now = rules, 0.0
        self.state = begin(rules, 0.0, None, -1, -1)

    def tell(self, *said: Input) -> list[Action]:
        found: list[Action] = []
        for item in said:
            self.state, actions = advance(self.state, item, self.now, self.rules, choose)
            found += actions
        return found

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.tell(Tick())

    def start(self) -> None:
        self.tell(*map(Joined, NODES))
        assert self.state.phase == RUNNING

    def end_ranks(self) -> list[Action]:
        return self.tell(*map(RanksEnded, self.state.living))


def test_all_nodes_start_at_once_and_a_normal_end_is_the_end() -> None:
    story = Story()
    assert story.tell(*map(Joined, NODES)) == [Start(0, NODES)]
    assert story.end_ranks() == [Judge(0)]
    assert story.tell(Saved(10), Judged(DONE, 0, "fine")) == [End(0, "fine", False)]
    assert story.tell(*map(Joined, ("9/x",)), CalledToLeave("late")) == []


def test_a_late_node_is_waited_for_and_then_gone_without() -> None:
    story = Story()
    assert story.tell(*map(Joined, NODES[:2])) == []
    assert story.wait(9) == []
    assert story.wait(1) == [Start(0, NODES[:2])]


def test_a_lost_node_is_fenced_and_the_others_go_on_once_they_have_ended() -> None:
    story = Story()
    story.start()
    assert story.tell(Lost("3/d", "silent")) == [Fence("3/d"), StopRanks(0, "silent")]
    assert story.tell(RanksEnded("0/a"), RanksEnded("1/b")) == []
    assert story.tell(RanksEnded("2/c")) == [Judge(0)]
    assert story.tell(Saved(10), Judged(FAILED, 113, "lost")) == [Start(1, NODES[:2])]
    # What is fenced does not come back; another agent in its seat does, at the next attempt.
    assert story.tell(Joined("3/d"), RanksEnded("3/d"), Joined("3/e")) == []
    assert story.state.nodes == ("0/a", "1/b", "2/c", "3/e")


def test_a_node_that_does_not_end_its_ranks_is_lost_at_the_deadline() -> None:
    story = Story()
    story.start()
    story.tell(RankFailed("rank 1 exited 1"), *map(RanksEnded, NODES[:3]))
    assert story.wait(19) == []
    assert story.wait(1) == [Fence("3/d"), Judge(0)]


def test_a_node_that_is_to_leave_leaves_after_a_checkpoint() -> None:
    story = Story()
    story.start()
    assert story.tell(AskedToLeave("1/b")) == [AskToSave(0)]
    story.tell(Saved(7))
    assert story.end_ranks() == [Judge(0)]
    assert story.tell(Judged(LEFT, 0, "left")) == [Fence("1/b"), Start(1, ("0/a", "2/c"))]


def test_preempted_it_saves_and_comes_back_even_if_the_save_takes_too_long() -> None:
    story = Story()
    story.start()
    assert story.tell(CalledToLeave("preempted")) == [AskToSave(0)]
    assert story.wait(30) == [StopRanks(0, "preempted")]
    story.end_ranks()
    assert story.tell(Saved(3), Judged(FAILED, 143, "told")) == [End(143, "told", True)]
    again = begin(RULES, 500.0, story.state, 3, 0)
    assert (again.fruitless, again.attempt) == (0, 0)


def test_who_asks_the_ranks_to_leave_by_himself_ends_the_run() -> None:
    story = Story()
    story.start()
    story.end_ranks()
    assert story.tell(Saved(4), Judged(LEFT, 0, "left")) == [End(0, "left", False)]


def test_three_attempts_without_a_new_checkpoint_are_enough() -> None:
    story = Story()
    story.start()
    for number in range(2):
        story.tell(RankFailed("bug"))
        story.end_ranks()
        assert story.tell(Judged(FAILED, 1, "bug")) == [Start(number + 1, NODES)]
    story.tell(RankFailed("bug"))
    story.end_ranks()
    said = "no new checkpoint in 3 attempts; the last one: bug"
    assert story.tell(Judged(FAILED, 1, "bug")) == [End(1, said, False)]


def test_too_few_nodes_are_waited_for_up_to_a_deadline() -> None:
    story = Story(replace(RULES, may_requeue=False))
    story.start()
    story.tell(Saved(8), *(Lost(node, "gone") for node in NODES[:3]), RanksEnded("3/d"))
    assert story.tell(Judged(FAILED, 113, "gone")) == []
    (end,) = story.wait(60)
    assert isinstance(end, End) and (end.code, end.requeue) == (113, False)
    assert "the checkpoint of iteration 8 is safe" in end.reason


def test_cancelled_while_gathering_it_ends_at_once() -> None:
    assert Story().tell(CalledToEnd("cancel")) == [End(143, "cancel", False)]


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

    @rule(seat=st.integers(0, 4))
    def join(self, seat: int) -> None:
        self.keys += 1
        name = f"{seat}/{self.keys}"
        for old in [node for node in self.nodes if node.startswith(f"{seat}/")]:
            self.nodes.remove(old)
            self.tell(Lost(old, "replaced"))
        self.nodes.append(name)
        self.tell(Joined(name))

    @rule()
    def fill(self) -> None:
        """An agent in each seat that is empty, as when a job starts."""
        for seat in range(RULES.expected):
            if not any(node.startswith(f"{seat}/") for node in self.nodes):
                self.join(seat)

    @precondition(lambda self: self.fenced)
    @rule(data=st.data())
    def speak_late(self, data: st.DataObject) -> None:
        """A node that was cut off and fenced is heard again."""
        node = data.draw(st.sampled_from(sorted(self.fenced)))
        self.tell(Joined(node))
        self.tell(RanksEnded(node))

    @precondition(lambda self: self.busy)
    @rule()
    def crash(self) -> None:
        """A rank fails and all nodes end theirs."""
        self.fail()
        while self.busy:
            node = min(self.busy)
            del self.busy[node]
            self.tell(RanksEnded(node))
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

    @rule(data=st.data(), outcome=st.sampled_from([DONE, LEFT, FAILED]))
    def end_ranks(self, data: st.DataObject, outcome: str) -> None:
        self.answer = (outcome, 0 if outcome != FAILED else 1)
        if self.busy:
            node = data.draw(st.sampled_from(sorted(self.busy)))
            del self.busy[node]
            self.tell(RanksEnded(node))

    @rule()
    def fail(self) -> None:
        self.answer = (FAILED, 1)
        self.tell(RankFailed("a rank failed"))

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
        value = json.loads(json.dumps({**asdict(self.state), "session": "s"}))
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
        self.now += 100
        number = max(self.attempts, default=-1)
        self.state = begin(self.rules, self.now, self.state, self.saved, number)

    @invariant()
    def no_checkpoint_is_forgotten(self) -> None:
        assert self.state.saved <= self.saved
        assert self.state.base <= self.state.saved

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


def test_a_state_of_another_version_is_not_taken() -> None:
    value = {**asdict(State()), "session": "s"}
    assert parse_state(value) == State()
    assert parse_state({**value, "colour": "red"}) is None
    assert parse_state(None) is None

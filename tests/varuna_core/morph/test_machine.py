"""The state machine of morphing, in stories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from varuna_core.morph.machine import advance, begin
from varuna_core.morph.messages import (
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
    RoomFound,
    Rules,
    Saved,
    Start,
    StopRanks,
    Tick,
)
from varuna_core.records.morphing import ENDED, RUNNING, ManagerState, parse_state

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
        self.tell(Joined(NODES))
        assert self.state.phase == RUNNING

    def ended(self, *nodes: str) -> list[Input]:
        return [RanksEnded((node,), self.state.attempt) for node in nodes]

    def failed(self, reason: str) -> Input:
        return RankFailed(reason, self.state.attempt)

    def end_ranks(self) -> list[Action]:
        return self.tell(*self.ended(*self.state.living))


def test_all_nodes_start_at_once_and_a_normal_end_is_the_end() -> None:
    story = Story()
    assert story.tell(Joined(NODES)) == [Start(0, NODES)]
    assert story.end_ranks() == [Judge(0)]
    assert story.tell(Saved(10), Judged(DONE, 0, "fine")) == [End(0, "fine", False)]
    assert story.tell(Joined(("9/x",)), CalledToLeave("late")) == []


def test_a_late_node_is_waited_for_and_then_gone_without() -> None:
    story = Story()
    assert story.tell(Joined(NODES[:2])) == []
    assert story.wait(9) == []
    assert story.wait(1) == [Start(0, NODES[:2])]


def test_a_lost_node_is_fenced_and_the_others_go_on_once_they_have_ended() -> None:
    story = Story()
    story.start()
    assert story.tell(Lost("3/d", "silent")) == [Fence("3/d"), StopRanks(0, "silent")]
    assert story.tell(*story.ended("0/a", "1/b")) == []
    assert story.tell(*story.ended("2/c")) == [Judge(0)]
    assert story.tell(Saved(10), Judged(FAILED, 113, "lost")) == [Start(1, NODES[:2])]
    # What is fenced does not come back; another agent in its seat does, at the next attempt.
    assert story.tell(Joined(("3/d",)), *story.ended("3/d"), Joined(("3/e",))) == []
    assert story.state.nodes == ("0/a", "1/b", "2/c", "3/e")


def test_a_node_that_does_not_end_its_ranks_is_lost_at_the_deadline() -> None:
    story = Story()
    story.start()
    story.tell(story.failed("rank 1 exited 1"), *story.ended(*NODES[:3]))
    assert story.wait(19) == []
    assert story.wait(1) == [Fence("3/d"), Judge(0)]


def test_what_is_told_of_an_attempt_after_its_end_does_not_end_the_next_one() -> None:
    """All of it can come in one look at the files, and the last end starts the next attempt."""
    story = Story()
    story.start()
    late = [story.failed("rank 1 exited 1"), *story.ended("0/a")]
    story.end_ranks()
    assert story.tell(Judged(FAILED, 1, "rank 1 exited 1")) == [Start(1, NODES)]
    before = story.state
    assert story.tell(*late) == [] and story.state == before


def test_a_node_that_is_to_leave_leaves_after_a_checkpoint() -> None:
    story = Story()
    story.start()
    assert story.tell(AskedToLeave("1/b")) == [AskToSave(0)]
    story.tell(Saved(7))
    assert story.end_ranks() == [Judge(0)]
    assert story.tell(Judged(LEFT, 0, "left")) == [Fence("1/b"), Start(1, ("0/a", "2/c"))]


def test_a_slow_node_leaves_the_same_way_and_is_told_but_never_below_the_fewest() -> None:
    story = Story(replace(RULES, min_nodes=3))
    story.start()
    text = "node 1 is left out: it is slow"
    assert story.tell(AskedToLeave("1/b", "it is slow")) == [AskToSave(0)]
    assert (story.state.left_out, story.state.why) == ((text,), text)
    assert story.tell(AskedToLeave("1/b", "it is slow")) == [], "its file stays, and is read again"
    assert story.tell(AskedToLeave("2/c", "it is slow too")) == [], "two would be left"
    assert story.state.left_out == (text,) and story.state.leaving == ("1/b",)
    assert story.tell(AskedToLeave("2/c")) == [], "a person may: it is asked for with the first"
    assert story.state.leaving == ("1/b", "2/c")


def test_preempted_it_saves_and_comes_back_even_if_the_save_takes_too_long() -> None:
    story = Story()
    story.start()
    assert story.tell(CalledToLeave("preempted")) == [AskToSave(0)]
    assert story.wait(30) == [StopRanks(0, "preempted")]
    story.end_ranks()
    assert story.tell(Saved(3), Judged(FAILED, 143, "told")) == [End(143, "told", True)]
    again = begin(RULES, 500.0, story.state, 3, 0)
    assert (again.fruitless, again.attempt) == (0, 0)


def test_nodes_that_join_while_ranks_train_are_taken_together_after_a_checkpoint() -> None:
    story = Story()
    story.start()
    assert story.tell(Joined(("4/e",))) == []
    assert story.wait(2) == []
    assert story.tell(Joined(("5/f",))) == []
    assert story.wait(2) == []  # three seconds after the last of them
    assert story.wait(1) == [AskToSave(0)]
    assert story.state.why == "2 more nodes are here"
    story.end_ranks()
    more = (*NODES, "4/e", "5/f")
    assert story.tell(Saved(5), Judged(LEFT, 0, "left")) == [Start(1, more)]


def test_nodes_that_no_plan_would_use_or_that_come_at_the_end_are_left_alone() -> None:
    story = Story()
    story.tell(Joined(("0/a",)), Joined(("1/b",)))
    assert story.wait(10) == [Start(0, NODES[:2])]
    assert story.tell(Joined(("2/c",))) == [] and story.wait(3) == []  # three would make two
    assert story.tell(Joined(("3/d",)), *story.ended("0/a")) == [] and story.wait(3) == []
    story.tell(*story.ended("1/b"))
    assert story.tell(Saved(9), Judged(DONE, 0, "fine")) == [End(0, "fine", False)]


def test_a_node_that_joined_and_is_gone_again_costs_nothing() -> None:
    story = Story()
    story.start()
    assert story.tell(Joined(("4/e",)), Lost("4/e", "cancelled")) == [Fence("4/e")]
    assert story.wait(3) == [] and story.state.phase == RUNNING


def test_who_asks_the_ranks_to_leave_by_himself_ends_the_run() -> None:
    story = Story()
    story.start()
    story.end_ranks()
    assert story.tell(Saved(4), Judged(LEFT, 0, "left")) == [End(0, "left", False)]


def test_three_attempts_without_a_new_checkpoint_are_enough() -> None:
    story = Story()
    story.start()
    for number in range(2):
        story.tell(story.failed("bug"))
        story.end_ranks()
        assert story.tell(Judged(FAILED, 1, "bug")) == [Start(number + 1, NODES)]
    story.tell(story.failed("bug"))
    story.end_ranks()
    said = "no new checkpoint in 3 attempts; the last one: bug"
    assert story.tell(Judged(FAILED, 1, "bug")) == [End(1, said, False)]


def test_a_failure_that_came_twice_ends_the_run_unless_its_node_can_be_left_out() -> None:
    for culprit, expected in (
        ("", [End(1, "bug; twice", False)]),
        ("2/c", [Fence("2/c"), Start(2, ("0/a", "1/b"))]),
    ):
        story = Story()
        story.start()
        for repeats in ("", "twice"):
            story.tell(story.failed("bug"))
            story.end_ranks()
            actions = story.tell(Judged(FAILED, 1, "bug", culprit, repeats))
        assert actions == expected


def test_too_few_nodes_are_waited_for_up_to_a_deadline() -> None:
    story = Story(replace(RULES, may_requeue=False))
    story.start()
    story.tell(Saved(8), *(Lost(node, "gone") for node in NODES[:3]), *story.ended("3/d"))
    assert story.tell(Judged(FAILED, 113, "gone")) == []
    (end,) = story.wait(60)
    assert isinstance(end, End) and (end.code, end.requeue) == (113, False)
    assert (
        end.note == "1 node is here, at least 2 are needed; the checkpoint of iteration 8 is safe"
    )
    assert end.reason == f"{end.note}; before that: gone"


def test_cancelled_while_gathering_it_ends_at_once() -> None:
    assert Story().tell(CalledToEnd("cancel")) == [End(143, "cancel", False)]


def test_a_run_that_was_over_counts_anew_and_one_that_comes_back_goes_on_counting() -> None:
    before = replace(ManagerState(), phase=ENDED, fruitless=2, saved=100, base=100)
    again = begin(RULES, 0.0, before, 100, 3)
    assert (again.fruitless, again.saved, again.attempt) == (0, 100, 3)
    assert begin(RULES, 0.0, replace(before, requeue=True), 100, 3).fruitless == 2
    lost = replace(before, phase=RUNNING)
    assert begin(RULES, 0.0, lost, 100, 3).fruitless == 3
    assert begin(RULES, 0.0, lost, 101, 3).fruitless == 0


def test_a_state_of_another_version_is_not_taken() -> None:
    value = {**asdict(ManagerState()), "session": "s"}
    assert parse_state(value) == ManagerState(session="s")
    assert parse_state({**value, "colour": "red"}) is None
    assert parse_state(None) is None


def test_a_checkpoint_that_turns_out_damaged_is_no_progress_and_not_called_safe() -> None:
    story = Story(replace(RULES, may_requeue=False))
    story.start()
    story.tell(Saved(20), story.failed("one"))
    story.end_ranks()
    story.tell(Judged(FAILED, 1, "one"))
    assert (story.state.attempt, story.state.fruitless) == (1, 0)
    for number in (1, 2):  # it begins at 10, comes to 20, and that is damaged again
        story.tell(Saved(10), Saved(20), story.failed("again"))
        story.end_ranks()
        story.tell(Judged(FAILED, 1, "again"))
        assert story.state.fruitless == number
    story.tell(Saved(10), *(Lost(node, "gone") for node in story.state.nodes))
    assert story.tell(Judged(FAILED, 113, "gone")) == [
        End(113, "no new checkpoint in 3 attempts; the last one: gone", False)
    ]


def test_what_is_safe_is_what_is_whole() -> None:
    story = Story(replace(RULES, may_requeue=False))
    story.start()
    story.tell(Saved(20), Saved(10), *(Lost(node, "gone") for node in NODES))
    story.tell(Judged(FAILED, 113, "gone"))
    (end,) = story.wait(RULES.wait_s)
    assert isinstance(end, End) and "the checkpoint of iteration 10 is safe" in end.reason


def fail_on(story: Story, node: str, *said: Input) -> list[Action]:
    story.tell(*said, story.failed(f"a rank on {node}"))
    story.end_ranks()
    return story.tell(Judged(FAILED, 1, f"a rank on {node}", node))


def test_a_node_that_fails_twice_without_a_new_checkpoint_is_left_out() -> None:
    story = Story()
    story.start()
    assert fail_on(story, "1/b") == [Start(1, NODES)]
    actions = fail_on(story, "1/b")
    assert actions[0] == Fence("1/b")
    assert actions[1] == Start(2, ("0/a", "2/c"))
    (text,) = story.state.left_out
    assert text.startswith("node 1 is left out") and "a rank on 1/b" in text


def test_who_fails_between_checkpoints_or_in_turn_stays() -> None:
    story = Story()
    story.start()
    fail_on(story, "1/b")
    fail_on(story, "2/c")  # another one
    assert fail_on(story, "2/c", Saved(10)) == [Start(3, NODES)]  # progress between
    assert fail_on(story, "2/c") == [Start(4, NODES)]
    assert story.state.left_out == ()


def test_a_node_whose_rank_stood_still_is_left_out_at_once() -> None:
    story = Story()
    story.start()
    story.tell(story.failed("rank 3 on b is stopped"))
    story.end_ranks()
    judged = Judged(FAILED, 114, "rank 3 on b is stopped", "1/b", is_sure=True)
    assert story.tell(judged) == [Fence("1/b"), Start(1, ("0/a", "2/c"))]
    (text,) = story.state.left_out
    assert text == "node 1 is left out: rank 3 on b is stopped"


def test_a_hang_that_comes_back_on_another_node_ends_the_run() -> None:
    story = Story()
    story.start()
    for culprit, repeats in (("1/b", ""), ("2/c", "twice")):
        story.tell(story.failed("a rank is stopped"))
        story.end_ranks()
        judged = Judged(FAILED, 114, "stopped", culprit, repeats, is_sure=not repeats)
        actions = story.tell(judged)
    assert [one.reason for one in actions if isinstance(one, End)] == ["stopped; twice"]


def test_a_hang_gives_the_job_back_where_the_conf_says_so_but_not_twice_after_one_step() -> None:
    for repeats, requeue in (("", True), ("twice", False)):
        story = Story()
        story.start()
        story.tell(story.failed("a rank is stopped"))
        story.end_ranks()
        judged = Judged(FAILED, 114, "stopped", repeats=repeats, wants_requeue=True)
        (end,) = story.tell(Saved(3), judged)
        assert isinstance(end, End) and end.requeue == requeue


def test_nobody_is_left_out_where_the_rest_is_too_few() -> None:
    story = Story(replace(RULES, min_nodes=4))
    story.start()
    fail_on(story, "1/b")
    assert fail_on(story, "1/b") == [Start(2, NODES)]
    assert story.state.left_out == ()


def test_steps_of_a_session_that_came_to_no_verdict_are_progress() -> None:
    """A script with checkpoints of its own, whose first node dies hard in each of five sessions."""
    story = Story()
    for number in range(5):
        story.start()
        assert (story.state.attempt, story.state.base_mark) == (number, 100 * number - 1)
        story.state = begin(RULES, story.now, story.state, -1, number, 100 * number + 99)
        assert (story.state.fruitless, story.state.whole) == (0, -1)
    story.start()
    story.state = begin(RULES, story.now, story.state, -1, 5, 499)
    assert story.state.fruitless == 1


def test_a_first_checkpoint_is_progress_whatever_steps_were_told_before_it() -> None:
    story = Story()
    story.start()
    for said, fruitless in ((Saved(-1, 150), 0), (Saved(100), 0), (Saved(100), 1)):
        story.tell(story.failed("bug"))
        story.end_ranks()
        story.tell(said, Judged(FAILED, 1, "bug"))
        assert story.state.fruitless == fruitless
    assert (story.state.saved, story.state.mark) == (100, 150)


def test_an_attempt_that_found_no_room_waits_for_it_and_does_not_count() -> None:
    """A full disk for a minute was three attempts without a new checkpoint."""
    story = Story()
    story.start()
    for number in range(5):
        story.tell(*story.ended(*NODES))
        assert story.tell(Judged(FAILED, 1, "No space left", no_room="/ckpt")) == []
        assert story.state.room == "/ckpt" and story.state.fruitless == 0
        assert story.wait(10 * RULES.wait_s) == []
        assert story.tell(RoomFound()) == [Start(number + 1, NODES)]
        assert story.state.room == ""


def test_who_is_told_to_end_does_not_wait_for_room() -> None:
    story = Story()
    story.start()
    story.tell(*story.ended(*NODES))
    story.tell(Judged(FAILED, 1, "No space left", no_room="/ckpt"))
    assert story.tell(CalledToEnd("cancelled")) == [End(1, "cancelled", False)]

"""Running ahead while a gradient is late: nothing lost, nothing overtaken, nothing stuck."""

from __future__ import annotations

import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.schedule.csv_text import parse_action
from varuna_core.schedule.actions import BACKWARDS, FORWARDS, Action
from varuna_core.schedule.order import Channel, find_source, find_target, run_ahead
from varuna_core.schedule.registry import build_schedule
from varuna_core.schedule.verify import verify


def read(text: str) -> list[Action]:
    return [parse_action("0" + word) for word in text.split()]


def test_the_drawing() -> None:
    """Micro-batch 0's gradient comes when f2 has run."""
    given_out: list[Action] = []
    listed = read("f0 f1 R0 B0 f2 R1 B1 R2 B2")
    order = run_ahead(
        listed, 2, lambda a: a.kind in FORWARDS or len(given_out) > 3, lambda a, b: None
    )
    for action in order:
        given_out.append(action)
    assert given_out == read("f0 f1 R0 f2 B0 R1 B1 R2 B2")


def test_a_forward_that_keeps_its_graph_is_not_pulled_ahead() -> None:
    listed = read("F0 B0 F1 B1")
    assert list(run_ahead(listed, 5, lambda a: a.kind in FORWARDS, lambda a, b: None)) == listed


def test_it_waits_for_whichever_comes_first() -> None:
    waited: list[str] = []
    there: set[str] = set()

    def wait(first: Action, second: Action) -> None:
        waited.append(f"{first} {second}")
        there.add(str(first))

    listed = read("f0 R0 B0 f1 R1 B1")
    assert list(run_ahead(listed, 1, lambda a: str(a) in there, wait)) == listed
    assert waited == ["0B0 0f1"]


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 4), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_ranks_that_run_ahead_end_whatever_comes_late(
    depth: int, count: int, bound: int, seed: int
) -> None:
    """A thread a rank, messages late at random, in channels as small as a plan makes them."""
    schedule = build_schedule("varuna", depth, count, recompute="full")
    held = verify(schedule)
    capacity = max(g + i for g, i in zip(held.graphs, held.inputs, strict=True)) + bound
    channels: dict[Channel, deque[int]] = {}
    changed = threading.Condition()
    given_out: list[list[Action]] = [[] for _ in range(depth)]
    draws = [random.Random(seed + rank) for rank in range(depth)]

    def find_channel(rank: int, source: tuple[bool, int] | None, sends: bool) -> Any:
        if source is None:
            return None
        other = schedule.placement[source[1]]
        key = (source[0], rank, other) if sends else (source[0], other, rank)
        return channels.setdefault(key, deque())

    def play(rank: int) -> None:
        def is_there(action: Action) -> bool:
            return find_channel(rank, find_source(action, depth), False) != deque()

        def wait(*actions: Action) -> None:
            assert changed.wait_for(lambda: any(map(is_there, actions)), 20), "stuck"

        def looks_there(action: Action) -> bool:
            return is_there(action) and draws[rank].random() < 0.7

        with changed:
            for action in run_ahead(schedule.ranks[rank], bound, looks_there, wait):
                wait(action)
                came = find_channel(rank, find_source(action, depth), False)
                if came is not None:
                    assert came.popleft() == action.microbatch
                out = find_channel(rank, find_target(action, depth), True)
                if out is not None:
                    assert changed.wait_for(lambda o=out: len(o) < capacity, 20), "full"  # type: ignore[misc]
                    out.append(action.microbatch)
                given_out[rank].append(action)
                changed.notify_all()

    with ThreadPoolExecutor(depth) as threads:
        for done in [threads.submit(play, rank) for rank in range(depth)]:
            done.result()
    for actions, listed in zip(given_out, schedule.ranks, strict=True):
        assert sorted(map(str, actions)) == sorted(map(str, listed))
        for kinds in (FORWARDS, BACKWARDS, ("R",)):
            assert [a for a in actions if a.kind in kinds] == [a for a in listed if a.kind in kinds]
        for index, action in enumerate(actions):
            begun = sum(a.kind in FORWARDS for a in actions[: index + 1])
            turn = listed.index(action)
            assert begun <= sum(a.kind in FORWARDS for a in listed[: turn + 1]) + bound

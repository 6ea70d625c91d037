"""Compute orders in which the actions of a schedule can run, without clocks.

`walk` runs all ranks, each through its list in order:

```
rank 0   F0 F1 ..    ──0F0─► ──0F1─►    channel of activations, rank 0 to 1: first in, first out
rank 1   .. F0 ..    ◄─1B0─             channel of gradients, rank 1 to 0
```

A rank waits for a message that has not been sent; if `capacity` is given, a rank also waits before
an action whose message finds that many unread messages in its channel. The messages that a rank
reads do not depend on timing, and so neither does a deadlock: a single walk suffices to detect it.

`run_ahead` lets a rank whose gradient is late run its next forward early:

```
as listed      f0 f1 R0 .. .. .. B0 f2 R1 B1     the gradient of micro-batch 0 is late
run ahead      f0 f1 R0 f2 .. .. B0    R1 B1     f2 fills the wait
```

The recompute precedes its backward in the list, so it has already run, and no other recompute is
pending. Forwards and backwards each keep their order: every channel stays first in, first out, sums
are computed in the same order, and no result changes. Only forwards that keep nothing but their
inputs run early, at most `bound` at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from varuna_core.schedule.actions import BACKWARDS, FORWARDS, Action, Schedule, ScheduleError

Channel = tuple[bool, int, int]
"""(True for activations, False for gradients; sending rank; receiving rank)."""


def find_source(action: Action, num_stages: int) -> tuple[bool, int] | None:
    """Return the sender of an action's input as (is activation, stage); None without an input."""
    if action.kind in FORWARDS:
        return (True, action.stage - 1) if action.stage > 0 else None
    if action.kind in BACKWARDS:
        return (False, action.stage + 1) if action.stage < num_stages - 1 else None
    return None


def find_target(action: Action, num_stages: int) -> tuple[bool, int] | None:
    """Return the receiver of an action's output as (is activation, stage); None if not sent."""
    if action.kind in FORWARDS:
        return (True, action.stage + 1) if action.stage < num_stages - 1 else None
    if action.kind in BACKWARDS:
        return (False, action.stage - 1) if action.stage > 0 else None
    return None


def walk(schedule: Schedule, capacity: int | None = None) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in a valid order of all actions, with at most `capacity` unread messages
    on each channel, if given; raise ScheduleError on a deadlock."""
    placement, last, ranks = schedule.placement, schedule.num_stages - 1, schedule.ranks
    sent: set[tuple[bool, int, int]] = set()  # (activation?, the stage it is for, micro-batch)
    unread: dict[Channel, int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    full: dict[Channel, int] = {}
    position = [0] * len(ranks)
    ready = list(range(len(ranks)))[::-1]
    while ready:
        rank = ready.pop()
        actions = ranks[rank]
        index = position[rank]
        while index < len(actions):
            action = actions[index]
            forward = action.kind in FORWARDS
            moves = forward or action.kind in BACKWARDS
            stage = action.stage
            takes = moves and (stage > 0 if forward else stage < last)
            makes = moves and (stage < last if forward else stage > 0)
            if takes and (forward, stage, action.microbatch) not in sent:
                waiting[forward, stage, action.microbatch] = rank
                break
            if makes:
                target = stage + 1 if forward else stage - 1
                to = placement[target]
                if to != rank and capacity is not None:
                    channel = (forward, rank, to)
                    if unread.get(channel, 0) >= capacity:
                        full[channel] = rank
                        break
                    unread[channel] = unread.get(channel, 0) + 1
                key = (forward, target, action.microbatch)
                sent.add(key)
                if key in waiting:
                    ready.append(waiting.pop(key))
            if takes:
                sent.remove((forward, stage, action.microbatch))
                source = placement[stage - 1 if forward else stage + 1]
                if source != rank and capacity is not None:
                    channel = (forward, source, rank)
                    unread[channel] -= 1
                    if channel in full:
                        ready.append(full.pop(channel))
            yield rank, action
            index += 1
        position[rank] = index
    stuck = [rank for rank in range(len(ranks)) if position[rank] < len(ranks[rank])]
    if stuck:
        raise ScheduleError(_describe_stuck(schedule, stuck, position, set(full.values())))


def _describe_stuck(
    schedule: Schedule, stuck: list[int], position: list[int], full: set[int]
) -> str:
    reasons = []
    for rank in stuck:
        action = schedule.ranks[rank][position[rank]]
        if rank in full:
            target = find_target(action, schedule.num_stages)
            assert target is not None
            why = f"waits for room to send to rank {schedule.placement[target[1]]}"
        else:
            source = find_source(action, schedule.num_stages)
            assert source is not None
            what = "activation" if source[0] else "gradient"
            peer = schedule.placement[source[1]]
            why = f"waits for the {what} of micro-batch {action.microbatch} from rank {peer}"
        reasons.append(f"rank {rank} at {action} (action {position[rank]}) {why}")
    return "deadlock: " + "; ".join(reasons)


def compute_capacity(schedule: Schedule) -> int:
    """Return the smallest number of unread messages per channel that avoids a deadlock."""
    low, high = 1, 1
    while not _can_run(schedule, high):
        low, high = high + 1, 2 * high
        if high > 4 * schedule.num_stages * schedule.num_microbatches:
            list(walk(schedule))  # stuck for another reason: say it
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _can_run(schedule, middle) else (middle + 1, high)
    return low


def _can_run(schedule: Schedule, capacity: int) -> bool:
    try:
        for _ in walk(schedule, capacity):
            pass
    except ScheduleError:
        return False
    return True


def run_ahead(
    actions: Sequence[Action],
    bound: int,
    is_there: Callable[[Action], bool],
    wait: Callable[[Action, Action], None],
) -> Iterator[Action]:
    """Yield the actions of a rank with one stage in the order in which to run them: while a
    backward waits for its message, up to `bound` forwards run earlier than listed.

    `is_there(action)` returns True if the action's input has arrived; `wait(a, b)` returns once the
    input of one of the two has arrived. Actions in their listed order are yielded without a check.
    """
    forwards = deque(i for i, action in enumerate(actions) if action.kind in FORWARDS)
    done: set[int] = set()
    for index, action in enumerate(actions):
        if index in done:
            done.remove(index)
            continue
        if forwards and forwards[0] == index:
            forwards.popleft()
        if action.kind in BACKWARDS:
            while forwards and len(done) < bound and not is_there(action):
                following = actions[forwards[0]]
                if following.kind != "f":
                    break
                if is_there(following):
                    done.add(forwards.popleft())
                    yield following
                else:
                    wait(action, following)
        yield action

"""Fuse `I` and `W` into `B` if this does not make the step longer.

A `B` costs less than its two parts, and needs no memory between them. So an `I` becomes a `B` if
all delayed actions can wait, and the next `W` of its stage is removed; all `W` of a stage cost the
same, so only the actions between the two are delayed:

```
third of four ranks, zero bubble     .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
fused                                .. .. F0 F1 .. I0 F2 I1 F3 B2 -- F4 B3 -- F5 I4 W0 I5 W1 W4 W5
```

An action's start is the longest path that ends at it, and its tail the longest path that begins
with it. The step becomes longer if start and tail of a new `B` exceed the step's length: the tails
of the actions in between get shorter. Starts are exact, since all earlier decisions have been made.
Tails are never underestimated; if a tail may be overestimated, because its path returns from other
ranks before the `W`, the tails of all actions in that period are recomputed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from varuna_core.schedule.actions import Action, Schedule
from varuna_core.schedule.compiled import Compiled, list_all_costs, list_hops
from varuna_core.schedule.costs import Costs

EQUAL = 1 + 1e-9
"""Ratio below which two times are equal, since the same numbers may be added in another order."""


MOST_BETWEEN = 24
"""Maximum actions per rank whose tails are recomputed for one decision; more are rarely of use."""


def count_fused(schedule: Schedule) -> int:
    """Count the backwards that compute both gradients at once."""
    return sum(action.kind == "B" for actions in schedule.ranks for action in actions)


def fuse(schedule: Schedule, costs: Costs) -> Schedule:
    """Fuse `I` and `W` to `B` wherever the simulated makespan does not increase.

    Stages whose fused backward costs more than its parts are skipped. No rank needs more memory
    than before, and messages keep their order.
    """
    while (fused := _Fusing(schedule, costs).run()) is not None:
        schedule = fused
    return schedule


class _Fusing:
    """One pass over a schedule, whose actions are numbered as in `Compiled`."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.compiled = compiled = Compiled(schedule)
        self.costs, self.hops = list_all_costs(costs), list_hops(costs)
        self.full, size = costs.by_kind["B"], len(compiled.ops)
        apart = map(sum, zip(costs.input_grad, costs.weight_grad, strict=True))
        self.pays = [b <= both * EQUAL for b, both in zip(self.full, apart, strict=True)]
        timed = compiled.run(self.costs, self.hops, keep_starts=True)
        self.limit = timed.makespan * EQUAL
        self.by_start = sorted(zip(timed.starts, range(size), strict=True))
        self.starts = timed.starts
        self.took = [self.costs[op[1]] for op in compiled.ops]
        self.next = [-1] * size
        """For each action, the next action of its rank."""
        self.tails = [0.0] * size
        self.sent = [0.0] * size
        """For each action, the length of the longest path that begins with its message."""
        self.receiver, self.behind = [-1] * size, [-1] * size
        """For each action, the action that gets its message, and the next action on the link."""
        self.fused, self.dropped = set[int](), set[int]()
        self._find_tails()

    def _find_tails(self) -> None:
        compiled = self.compiled
        first = [-1] * compiled.num_ranks
        taker = [-1] * compiled.num_slots
        sender = [-1] * compiled.num_links
        for index in reversed(range(len(compiled.ops))):
            rank, _, takes, makes, link, _ = compiled.ops[index]
            self.next[index], first[rank] = first[rank], index
            if makes >= 0:
                self.receiver[index] = taker[makes]
            if link >= 0:
                self.behind[index], sender[link] = sender[link], index
            if takes >= 0:
                taker[takes] = index
            self._find_tail(index)

    def _find_tail(self, index: int) -> None:
        """Compute the longest path that begins with an action, from the actions after it."""
        receiver, following = self.receiver[index], self.next[index]
        path = 0.0
        if receiver >= 0:
            path = self.tails[receiver]
            _, _, _, _, link, hop = self.compiled.ops[index]
            if link >= 0:
                behind = self.behind[index]
                path = max(path, self.sent[behind] if behind >= 0 else 0.0) + self.hops[hop]
            self.sent[index] = path
        if following >= 0:
            path = max(path, self.tails[following])
        self.tails[index] = self.took[index] + path

    def run(self) -> Schedule | None:
        """Decide in order of time, with `Compiled.run`'s times; return None if none was fused."""
        compiled = self.compiled
        free = [0.0] * compiled.num_ranks
        link_free = [0.0] * compiled.num_links
        arrival = [0.0] * compiled.num_slots
        for index, (rank, _, takes, makes, link, hop) in enumerate(compiled.ops):
            if index in self.dropped:
                continue
            start = free[rank]
            if takes >= 0:
                start = max(start, arrival[takes])
            if compiled.actions[index][1] == "I":
                self._try(index, start)
            end = free[rank] = start + self.took[index]
            if makes >= 0:
                if link >= 0:
                    end = link_free[link] = max(end, link_free[link]) + self.hops[hop]
                arrival[makes] = end
        return self._render() if self.fused else None

    def _try(self, index: int, start: float) -> None:
        """Fuse an `I` that starts at `start`, unless the step would become longer."""
        stage = self.compiled.actions[index][2]
        if not self.pays[stage]:
            return
        between = []
        last, at = index, self.next[index]
        while at >= 0 and self.compiled.actions[at][1:3] != ("W", stage):
            between.append(at)
            last, at = at, self.next[at]
        if at < 0:  # no W of the stage is left to drop
            return
        rest, took = self.next[at], self.took[index]
        alone = sum(self.took[inner] for inner in between) + (self.tails[rest] if rest >= 0 else 0)
        if start + self.full[stage] + alone > self.limit:
            return
        self.next[last], self.took[index] = rest, self.full[stage]
        self.dropped.add(at)
        kept: dict[int, tuple[float, float]] = {}
        for actions in ([*reversed(between), index], self._list_between(index, at)):
            for other in actions:
                kept.setdefault(other, (self.tails[other], self.sent[other]))
                self._find_tail(other)
            if start + self.tails[index] <= self.limit:
                self.fused.add(index)
                return
        self.next[last], self.took[index] = at, took
        self.dropped.remove(at)
        for other, (tail, sent) in kept.items():
            self.tails[other], self.sent[other] = tail, sent

    def _list_between(self, first: int, last: int) -> Iterator[int]:
        """Yield all actions that start between two actions in the given schedule, latest first."""
        begin = bisect_left(self.by_start, (self.starts[first], -1))
        end = bisect_right(self.by_start, (self.starts[last], len(self.starts)))
        found = self.by_start[begin : min(end, begin + MOST_BETWEEN * self.compiled.num_ranks)]
        order = sorted((index for _, index in found), reverse=True)
        return (index for index in order if index not in self.dropped)

    def _render(self) -> Schedule:
        """Build the schedule of the remaining actions; a `W` is for the oldest pending one."""
        ranks: list[list[Action]] = [[] for _ in self.schedule.ranks]
        lacking: list[deque[int]] = [deque() for _ in self.schedule.placement]
        for index, (rank, kind, stage, microbatch) in enumerate(self.compiled.actions):
            if index in self.dropped:
                continue
            if kind == "W":
                microbatch = lacking[stage].popleft()
            elif index in self.fused:
                kind = "B"
            elif kind == "I":
                lacking[stage].append(microbatch)
            ranks[rank].append(Action(kind, stage, microbatch))
        return replace(self.schedule, ranks=tuple(map(tuple, ranks)))

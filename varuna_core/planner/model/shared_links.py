"""Simulate the pipelines of replicas whose messages share links.

```
in turn   a0 b0 a1 b1 a2 b2      as one replica is timed: its message, then those of the others
drawn     a0 a1 b0 a2 b1 b2      a link takes whichever: b's next action waits for b0
```

A replica that others overtake is delayed at each message for which the link is busy, and in the end
all replicas wait for it. The simulation of a single replica cannot show this: in `Compiled.run`,
replicas take turns and are only offset at the start. The delay is largest if the stages of a rank
send over the same link many times.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence

from varuna_core.planner.model.step import ActionCosts
from varuna_core.schedule.compiled import Compiled


def run_together(
    compiled: Compiled, costs: ActionCosts, sharing: Sequence[int], draw: random.Random
) -> float:
    """Simulate one training step of several replicas of a pipeline that share network links, and
    return the time at which the last replica ends. `sharing` has, for each boundary between two
    stages, the number of replicas that send over the same link."""
    return _Together(compiled, costs, sharing, draw).run()


class _Together:
    def __init__(
        self, compiled: Compiled, costs: ActionCosts, sharing: Sequence[int], draw: random.Random
    ) -> None:
        self.costs, self.sharing, self.draw = costs, sharing, draw
        self.holds = costs.hops if costs.holds is None else costs.holds
        replicas, ranks = range(max(sharing)), range(compiled.num_ranks)
        of_rank: list[list[tuple[int, int, int, int, int, int]]] = [[] for _ in ranks]
        self.takers = [0] * compiled.num_slots
        for op in compiled.ops:
            of_rank[op[0]].append(op)
            if op[2] >= 0:
                self.takers[op[2]] = op[0]
        self.left = {(d, r): deque(of_rank[r]) for d in replicas for r in ranks}
        self.working = set[tuple[int, int]]()
        self.here = set[tuple[int, int]]()
        """Messages that have arrived, as pairs of replica and slot."""
        self.waiting: dict[tuple[int, int], dict[int, deque[tuple[int, int]]]] = {}
        """Messages (slot, hop) that wait for a link, by the link and the group of replicas on it,
        then by replica."""
        self.taken = set[tuple[int, int]]()
        """Links that are in use."""
        self.events: list[tuple[float, int, str, tuple[int, int]]] = []
        self.count = 0

    def run(self) -> float:
        done = 0.0
        for place in self.left:
            self._begin(0.0, place)
        while self.events:
            now, _, kind, which = heapq.heappop(self.events)
            if kind == "end":
                done = now
                self._end(now, which)
            elif kind == "come":
                self.here.add(which)
                self._begin(now, (which[0], self.takers[which[1]]))
            else:
                self.taken.remove(which)
                self._serve(now, which)
        return done

    def _add(self, at: float, kind: str, which: tuple[int, int]) -> None:
        self.count += 1
        heapq.heappush(self.events, (at, self.count, kind, which))

    def _begin(self, now: float, place: tuple[int, int]) -> None:
        """Begin the next action of a rank if the rank is idle and the message has arrived."""
        actions = self.left[place]
        if place in self.working or not actions:
            return
        _, cost, takes, *_ = actions[0]
        if takes < 0 or (place[0], takes) in self.here:
            self.working.add(place)
            self._add(now + self.costs.costs[cost], "end", place)

    def _end(self, now: float, place: tuple[int, int]) -> None:
        replica = place[0]
        _, _, _, makes, link, hop = self.left[place].popleft()
        self.working.remove(place)
        if makes >= 0 and link < 0:
            self.here.add((replica, makes))
        elif makes >= 0:
            shared = link, replica // self.sharing[hop // 2]
            self.waiting.setdefault(shared, {}).setdefault(replica, deque()).append((makes, hop))
            if shared not in self.taken:
                self._serve(now, shared)
        self._begin(now, place)

    def _serve(self, now: float, link: tuple[int, int]) -> None:
        """Send the next message of a random replica; each replica's own messages stay in order."""
        ready = [replica for replica, own in self.waiting[link].items() if own]
        if not ready:
            return
        replica = self.draw.choice(ready)
        slot, hop = self.waiting[link][replica].popleft()
        alone, others = self.costs.hops[hop], self.sharing[hop // 2] - 1
        self.taken.add(link)
        self._add(now + alone, "come", (replica, slot))
        self._add(now + ((self.holds[hop] - alone) / others if others else alone), "free", link)

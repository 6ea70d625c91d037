"""Work for a rank whose gradient is late: the next forward, whose turn has not come yet.

```
as listed      f0 f1 R0 .. .. .. B0 f2 R1 B1     the gradient of micro-batch 0 comes late
run ahead      f0 f1 R0 f2 .. .. B0    R1 B1     f2 fills the wait
```

The recompute stands before its backward in the list, so it has been run by then and is the only
one outstanding. Forwards and backwards each keep their order: every channel stays first in, first
out, sums are made in the same order, and no result changes. Only forwards that keep nothing but
their inputs are pulled ahead, no more than `bound` at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from varuna_core.schedule.actions import BACKWARDS, FORWARDS, Action


def run_ahead(
    actions: Sequence[Action],
    bound: int,
    is_there: Callable[[Action], bool],
    wait: Callable[[Action, Action], None],
) -> Iterator[Action]:
    """The actions of one rank with one stage in the order in which they can run.

    `is_there(action)` says whether what the action takes has come; `wait(a, b)` returns when it
    has for one of the two. An action that is given out first need not be there.
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

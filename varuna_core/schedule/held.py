"""Count the micro-batches in a rank's device memory while each of its actions runs.

```
action    F0 O0 F1 O1 F2 L0 F3 O3 B0
graphs     1  1  2  1  2  2  3  3  3     F1 runs while the graph of O0 is copied
```

A recompute and a load turn inputs into a graph; an offload turns a graph into inputs. The copy
overlaps with the next actions, so the memory of an `O` is free when the rank's next `O` or `L`
starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from varuna_core.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class LiveMicroBatches:
    """Numbers of micro-batches that a rank holds, by stage."""

    graphs: dict[int, int]
    inputs: dict[int, int]
    offloaded: dict[int, int]
    """Micro-batches whose graphs are offloaded; only their inputs are held."""


def follow_held(
    actions: Sequence[Action], stages: Sequence[int]
) -> Iterator[tuple[Action, LiveMicroBatches]]:
    """Yield each action with the micro-batches held while it runs; the counts object is reused."""
    held = LiveMicroBatches(*(dict.fromkeys(stages, 0) for _ in range(3)))
    graphs, inputs, offloaded = held.graphs, held.inputs, held.offloaded
    leaving: int | None = None
    """Stage of the last offload, until its memory is free."""

    for action in actions:
        kind, stage = action.kind, action.stage
        if leaving is not None and kind in "OL":
            graphs[leaving] -= 1
            inputs[leaving] += 1
            leaving = None
        if kind == "F":
            graphs[stage] += 1
        elif kind == "f":
            inputs[stage] += 1
        elif kind in "RL":
            inputs[stage] -= 1
            graphs[stage] += 1
            offloaded[stage] -= kind == "L"
        elif kind == "O":
            offloaded[stage] += 1
            leaving = stage
        yield action, held
        if kind in "BW":
            graphs[stage] -= 1

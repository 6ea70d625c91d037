"""The partition text: parser, its two ways of counting, and the balanced cut. No torch.

A model that passes n cuts has n + 1 segments. `0-11-8-8-8-8-5-0` says how many blocks between cuts
(there are n - 1) each stage holds; what lies before the first cut and after the last one goes,
uncounted, to the first and the last stage. A text that sums to n + 1 counts every segment.

    n = 4 cuts      seg 0 | block | block | block | seg 4
    "1-0-2"         ---stage 0--- (stage 1) -----stage 2----
    "2-0-3"         the same, every segment counted

Schedules with several stages a rank have a number for each stage.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import List, Literal, Optional, Sequence, Tuple

Problem = Literal["sum", "ends"]

_TEXT = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})*")


class PartitionError(ValueError):
    """A text that is no partition."""


def parse_counts(text: str) -> Tuple[int, ...]:
    """The numbers of a partition text."""
    if not _TEXT.fullmatch(text):
        raise PartitionError(f"partition {text!r}: want numbers joined by '-', such as 0-11-8-5-0")
    return tuple(int(word) for word in text.split("-"))


def find_problem(counts: Sequence[int], num_segments: int) -> Optional[Problem]:
    """Why these counts cannot be of a model with so many segments; None where they can.

    sum: they add up to neither all segments nor the blocks between cuts. ends: they count all
    segments, but the first or the last stage lacks the one that only it can hold.
    """
    if sum(counts) == num_segments:
        return "ends" if counts[0] < 1 or counts[-1] < 1 else None
    return None if sum(counts) == num_segments - 2 else "sum"


def include_ends(counts: Sequence[int], num_segments: int) -> Tuple[int, ...]:
    """The counts with every segment counted."""
    return _add_ends(counts, 1) if sum(counts) == num_segments - 2 else tuple(counts)


def exclude_ends(counts: Sequence[int], num_segments: int) -> Tuple[int, ...]:
    """The counts of blocks between cuts alone."""
    return _add_ends(counts, -1) if sum(counts) == num_segments else tuple(counts)


def _add_ends(counts: Sequence[int], number: int) -> Tuple[int, ...]:
    changed = list(counts)
    changed[0] += number
    changed[-1] += number
    return tuple(changed)


def parse_partition(partition: str | Sequence[int], num_cuts: int, num_stages: int) -> List[range]:
    """The segments of each stage; an empty range for a stage that holds none."""
    shown = partition if isinstance(partition, str) else "-".join(map(str, partition))
    counts = parse_counts("-".join(word.strip() for word in shown.split("-")))
    if len(counts) != num_stages:
        raise ValueError(f"partition {shown!r} has {len(counts)} numbers for {num_stages} stages")
    num_segments = num_cuts + 1
    problem = find_problem(counts, num_segments)
    if problem == "ends":
        raise ValueError(
            f"partition {shown!r} counts all {num_segments} segments: "
            "its first and last number must be at least 1"
        )
    if problem == "sum":
        allowed = f"{num_cuts - 1} (blocks between cuts) or " if num_cuts else ""
        raise ValueError(
            f"partition {shown!r} sums to {sum(counts)}; the model passes {num_cuts} CutPoints, "
            f"so it must sum to {allowed}{num_segments} (all segments)"
        )
    counts = include_ends(counts, num_segments)
    return [range(end - counts[at], end) for at, end in enumerate(accumulate(counts))]


def balance(costs: Sequence[float], num_stages: int) -> List[range]:
    """Contiguous stages, none empty, whose slowest is as fast as can be; the first such cut."""
    size = len(costs)
    if not 1 <= num_stages <= size:
        raise ValueError(
            f"{num_stages} stages need at least {num_stages - 1} CutPoints, the model passes "
            f"{size - 1}: add CutPoints, use fewer stages, or give a partition with zeros"
        )
    sums = [0.0, *accumulate(costs)]
    # best[end]: the least possible maximum when the stages so far hold segments 0..end-1
    best = sums[:]
    starts: List[List[int]] = []
    for stage in range(1, num_stages):
        row, chosen = [float("inf")] * (size + 1), [0] * (size + 1)
        for end in range(stage + 1, size + 1):
            for start in range(stage, end):
                worst = max(best[start], sums[end] - sums[start])
                if worst < row[end]:
                    row[end], chosen[end] = worst, start
        best = row
        starts.append(chosen)
    stages, end = [], size
    for chosen in reversed(starts):
        stages.append(range(chosen[end], end))
        end = chosen[end]
    stages.append(range(0, end))
    return stages[::-1]

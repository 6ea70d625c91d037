"""Which segments a stage holds: the partition text, and the balanced cut. No torch.

A model that passes n cuts has n + 1 segments. `0-11-8-8-8-8-5-0` says how many blocks between cuts
(there are n - 1) each stage holds; what lies before the first cut and after the last one goes,
uncounted, to the first and the last stage. A text that sums to n + 1 counts every segment.

    n = 4 cuts      seg 0 | block | block | block | seg 4
    "1-0-2"         ---stage 0--- (stage 1) -----stage 2----
    "2-0-3"         the same, every segment counted
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def parse_partition(text: str | Sequence[int], num_cuts: int, num_stages: int) -> list[range]:
    """The segments of each stage; an empty range for a stage that holds none."""
    shown = text if isinstance(text, str) else "-".join(map(str, text))
    words = shown.split("-")
    if not all(word.strip().isdigit() for word in words):
        raise ValueError(f"partition {shown!r}: want numbers joined by '-', such as 0-11-8-5-0")
    counts = [int(word) for word in words]
    if len(counts) != num_stages:
        raise ValueError(f"partition {shown!r} has {len(counts)} numbers for {num_stages} stages")
    if sum(counts) == num_cuts + 1:
        if counts[0] < 1 or counts[-1] < 1:
            raise ValueError(
                f"partition {shown!r} counts all {num_cuts + 1} segments: "
                "its first and last number must be at least 1"
            )
    elif sum(counts) == num_cuts - 1:
        counts[0] += 1
        counts[-1] += 1
    else:
        allowed = f"{num_cuts - 1} (blocks between cuts) or " if num_cuts else ""
        raise ValueError(
            f"partition {shown!r} sums to {sum(counts)}; the model passes {num_cuts} CutPoints, "
            f"so it must sum to {allowed}{num_cuts + 1} (all segments)"
        )
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
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
    starts: list[list[int]] = []
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

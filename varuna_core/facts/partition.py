"""Partition: the number of the model's segments that each stage holds.

A model with n cuts has n + 1 segments. `0-11-8-8-8-8-5-0` gives the number of blocks between cuts
(there are n - 1) on each stage; the segments before the first cut and after the last one are not
counted and belong to the first and the last stage. A text that sums to n + 1 counts every segment.

    n = 4 cuts      seg 0 | block | block | block | seg 4
    "1-0-2"         ---stage 0--- (stage 1) -----stage 2----
    "2-0-3"         the same, every segment counted

If a schedule places several stages on a rank, the partition has a number for each stage.

Text is parsed once, at input: from a conf, a script's argument, or a file of a run. Files and
variables store the text again (`spell`); all other code passes the type. Four more files are the
whole way from `partition: 5-2` in a conf to the layers of a rank:

    records/plan.py          Plan.partition, in plan.json; place_variables: VJOB_PARTITION
    runtime/arguments.py     ConfArguments.choose_partition: that variable, or the script's own
    runtime/assembly.py      assemble: which stages a rank holds, by the schedule
    runtime/split/split.py   split_model: `ranges` of segments; make_stage: their layers
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import List, Literal, Optional, Sequence, Tuple, Union

Problem = Literal["sum", "ends"]
EXAMPLE = "0-11-8-5-0"
_NUMBER = re.compile(r"[0-9]{1,6}")


class PartitionError(ValueError):
    """Raised for a text that is not a valid partition."""


class Partition:
    """The number of segments of each stage, in the order of the stages."""

    __slots__ = ("counts",)
    counts: Tuple[int, ...]

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        if not self.counts or min(self.counts) < 0:
            raise PartitionError(f"partition {self.spell()!r}: expected numbers of 0 or more")

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Parse a text such as `0-11-8`; the error names the first word that is not a number."""
        words = text.split("-")
        for at, word in enumerate(words, 1):
            if not _NUMBER.fullmatch(word):
                where = f"; number {at} is {word!r}" if len(words) > 1 else ""
                raise PartitionError(
                    f"partition {text!r}: expected numbers joined by '-', such as {EXAMPLE}{where}"
                )
        return cls([int(word) for word in words])

    @classmethod
    def find(cls, text: str) -> Optional[Partition]:
        """Return the partition in a text from a log or an older run; None for any other text."""
        try:
            return cls.parse(text.strip())
        except PartitionError:
            return None

    @classmethod
    def take(cls, value: Union[str, Sequence[int], Partition]) -> Partition:
        """Convert a script's argument, which is text (spaces are ignored), a sequence of numbers or
        a partition, to a partition."""
        if isinstance(value, Partition):
            return value
        if isinstance(value, str):
            return cls.parse("-".join(word.strip() for word in value.split("-")))
        return cls(value)

    @property
    def num_stages(self) -> int:
        return len(self.counts)

    def spell(self) -> str:
        return "-".join(map(str, self.counts))

    def find_problem(self, num_segments: int) -> Optional[Problem]:
        """Return why the partition does not fit a model with this many segments; None if it fits.

        "sum": the numbers add up to neither all segments nor the blocks between cuts. "ends": they
        add up to all segments, but the first or the last stage lacks its own end segment.
        """
        if sum(self.counts) == num_segments:
            return "ends" if self.counts[0] < 1 or self.counts[-1] < 1 else None
        return None if sum(self.counts) == num_segments - 2 else "sum"

    def with_ends(self, num_segments: int) -> Partition:
        """Return the same partition with every segment counted."""
        return self._add_ends(1) if sum(self.counts) == num_segments - 2 else self

    def without_ends(self, num_segments: int) -> Partition:
        """Return the same partition with only blocks between cuts counted."""
        return self._add_ends(-1) if sum(self.counts) == num_segments else self

    def blocks(self, layers: Optional[int]) -> Partition:
        """Return the partition in blocks between cuts, as runs print it; unchanged if `layers` is
        None."""
        return self if layers is None else self.without_ends(layers + 2)

    def ranges(self, num_cuts: int, num_stages: int) -> List[range]:
        """Return the range of segments of each stage; it is empty for a stage without segments."""
        if len(self.counts) != num_stages:
            raise PartitionError(
                f"partition {self.spell()!r} has {len(self.counts)} numbers for {num_stages} stages"
            )
        num_segments = num_cuts + 1
        problem = self.find_problem(num_segments)
        if problem == "ends":
            raise PartitionError(
                f"partition {self.spell()!r} counts all {num_segments} segments: "
                "its first and last number must be at least 1"
            )
        if problem == "sum":
            allowed = f"{num_cuts - 1} (blocks between cuts) or " if num_cuts else ""
            raise PartitionError(
                f"partition {self.spell()!r} sums to {sum(self.counts)}; the model passes "
                f"{num_cuts} CutPoints, so it must sum to {allowed}{num_segments} (all segments)"
            )
        counts = self.with_ends(num_segments).counts
        return [range(end - counts[at], end) for at, end in enumerate(accumulate(counts))]

    def _add_ends(self, number: int) -> Partition:
        changed = list(self.counts)
        changed[0] += number
        changed[-1] += number
        return Partition(changed)

    def __str__(self) -> str:
        return self.spell()

    def __repr__(self) -> str:
        return f"Partition.parse({self.spell()!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self.counts == other.counts

    def __hash__(self) -> int:
        return hash(self.counts)

"""The stage map: the ranks at each place in the pipeline. Also computes balanced partitions.

A stage map in Varuna's encoding has a field for each place in the pipeline, which lists the ranks
of its replicas in order:

    "0,3;1,4;2,5;"   replica 0: rank 0 -> 1 -> 2      place 0: ranks 0 and 3
                     replica 1: rank 3 -> 4 -> 5      place 1: ranks 1 and 4, and so on

Place k holds stage k, or several stages:

    interleaved, two a rank    stages 0 3 | 1 4 | 2 5    round and round
    zbv                        stages 0 5 | 1 4 | 2 3    down and up again

With tensor parallelism of degree T an entry k stands for the ranks kT to kT+T-1. Those of one
tensor rank t are a layout of their own, a slice: one StageMap is one slice. Standard library,
Python 3.8: agents and reports read both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Dict, List, Sequence, Tuple


def balance(costs: Sequence[float], num_stages: int) -> List[range]:
    """Partition costs into contiguous, non-empty stages so that the slowest stage is as fast as
    possible; of several such partitions, return the first."""
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


@dataclass(frozen=True)
class RankPlace:
    """Position of one rank in the layout."""

    place: int
    """Place in the rank's pipeline; with every schedule it is also the number of the rank's first
    stage."""
    replica: int
    stages: Tuple[int, ...]


@dataclass(frozen=True)
class StageMap:
    """The ranks of every place, and the place of every stage."""

    ranks: tuple[tuple[int, ...], ...]
    """For each place, the ranks of its replicas in this slice."""

    placement: tuple[int, ...] = ()
    """The place of each stage; by default each place has one stage."""

    tensor: int = 1
    """Ranks that share each place's layers."""

    tensor_rank: int = 0

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.ranks))))

    @property
    def depth(self) -> int:
        """Number of ranks in one pipeline."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_replicas(self) -> int:
        return len(self.ranks[0])

    @property
    def world_size(self) -> int:
        return self.depth * self.num_replicas * self.tensor

    @property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of places that exchange activations, each once, in stage order."""
        found: dict[tuple[int, int], None] = {}
        for at, place in enumerate(self.placement[1:]):
            if place != self.placement[at]:
                found[self.placement[at], place] = None
        return tuple(found)

    def find(self, rank: int) -> tuple[int, int]:
        """Return the place and the replica of a rank in any slice."""
        own = rank - rank % self.tensor + self.tensor_rank
        for place, ranks in enumerate(self.ranks):
            if own in ranks:
                return place, ranks.index(own)
        raise ValueError(f"rank {rank} has no place in stage_to_rank_map {str(self)!r}")

    def slice(self, tensor_rank: int) -> StageMap:
        """Return the slice of this tensor rank."""
        step = tensor_rank - self.tensor_rank
        moved = tuple(tuple(rank + step for rank in ranks) for ranks in self.ranks)
        return replace(self, ranks=moved, tensor_rank=tensor_rank)

    def sharing(self, place: int, replica: int) -> list[int]:
        """Return the ranks that share the layers of a place in one replica."""
        first = self.ranks[place][replica] - self.tensor_rank
        return list(range(first, first + self.tensor))

    def list_replica(self, replica: int) -> list[int]:
        """Return all ranks of a replica."""
        return [r for place in range(self.depth) for r in self.sharing(place, replica)]

    def stages_of(self, place: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == place)

    def places_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """Return the places that hold these stages, each once, in stage order."""
        return tuple(dict.fromkeys(self.placement[stage] for stage in stages))

    def name(self, rank: int) -> str:
        place, replica = self.find(rank)
        stages = self.stages_of(place)
        word = "stage" if len(stages) == 1 else "stages"
        held = f"{word} {' and '.join(map(str, stages))}, replica {replica}"
        if self.tensor > 1:
            held += f", tensor rank {rank % self.tensor}"
        return f"rank {rank} ({held})"

    def with_placement(self, placement: Sequence[int]) -> StageMap:
        """Return the same ranks with several stages at each place, as a schedule places them."""
        return replace(self, placement=tuple(placement))

    def __str__(self) -> str:
        """Return the entries in Varuna's encoding, as they were given."""
        fields = ([str(rank // self.tensor) for rank in ranks] for ranks in self.ranks)
        return "".join(",".join(field) + ";" for field in fields)


def parse_stage_map(
    value: str | Sequence[Sequence[int]], world_size: int, tensor: int = 1
) -> StageMap:
    """Parse a stage map from text, or from a list that has the ranks of each stage; every rank of
    the world must occur exactly once.

    With `tensor` above 1 each entry stands for that many ranks; return the slice of tensor rank 0.
    """
    if tensor < 1 or world_size % tensor:
        raise ValueError(f"tensor {tensor} must divide the {world_size} ranks")
    entries = world_size // tensor
    if isinstance(value, str):
        text = value.strip()
        fields = (text[:-1] if text.endswith(";") else text).split(";")
        words = [[word.strip() for word in field.split(",")] for field in fields]
        if not all(word.isdecimal() for field in words for word in field):
            raise ValueError(f"stage_to_rank_map {value!r}: expected ranks as in '0,3;1,4;2,5;'")
        ranks = tuple(tuple(map(int, field)) for field in words)
    else:
        ranks = tuple(tuple(field) for field in value)
    if not ranks or not ranks[0] or any(len(field) != len(ranks[0]) for field in ranks):
        raise ValueError(f"stage_to_rank_map {value!r}: every stage needs as many ranks as stage 0")
    if sorted(rank for field in ranks for rank in field) != list(range(entries)):
        what = f"ranks 0 to {entries - 1}"
        if tensor > 1:
            what = f"entries 0 to {entries - 1} (of {tensor} ranks each, of {world_size})"
        raise ValueError(f"stage_to_rank_map {value!r} must name each of the {what} once")
    return StageMap(
        ranks=tuple(tuple(rank * tensor for rank in field) for field in ranks), tensor=tensor
    )


def locate_ranks(text: str, tensor: int = 1, placement: Sequence[int] = ()) -> Dict[int, RankPlace]:
    """Return the place of every rank. If `placement` is empty, each place counts as one stage."""
    fields = decode_stage_map(text)
    ranks = tuple(tuple(entry * tensor for entry in entries) for entries in fields)
    layout = StageMap(ranks=ranks, placement=tuple(placement), tensor=tensor)
    return {
        first + tensor_rank: RankPlace(place, replica, layout.stages_of(place))
        for place, replicas in enumerate(ranks)
        for replica, first in enumerate(replicas)
        for tensor_rank in range(tensor)
    }


def build_stages(pipeline: int, data: int, order: str) -> List[List[int]]:
    """Return, for each place in the pipeline, the entries of its replicas.

        order: pipeline, P=3 D=2     0,3;1,4;2,5;   replica r is ranks 3r..3r+2: its places adjoin
        order: data,     P=3 D=2     0,1;2,3;4,5;   place s is ranks 2s, 2s+1: its replicas adjoin

    With tensor parallelism of degree T an entry k stands for ranks kT to kT+T-1.
    """
    if order == "pipeline":
        return [[r * pipeline + s for r in range(data)] for s in range(pipeline)]
    return [[s * data + r for r in range(data)] for s in range(pipeline)]


def encode_stage_map(stages: List[List[int]]) -> str:
    """Encode [[0, 3], [1, 4]] as `0,3;1,4;`."""
    return "".join(",".join(str(rank) for rank in ranks) + ";" for ranks in stages)


def decode_stage_map(text: str) -> List[List[int]]:
    """Decode `0,3;1,4;` to [[0, 3], [1, 4]]."""
    return [[int(rank) for rank in field.split(",")] for field in text.split(";") if field]

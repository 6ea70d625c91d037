"""Where each stage and replica runs, as Varuna writes it: `0,3;1,4;2,5;`. No torch.

A field a stage, in it the ranks of its replicas in order:

    "0,3;1,4;2,5;"   replica 0: rank 0 -> 1 -> 2      stage 0: ranks 0 and 3
                     replica 1: rank 3 -> 4 -> 5      stage 1: ranks 1 and 4, and so on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StageMap:
    """The rank of every stage of every replica."""

    ranks: tuple[tuple[int, ...], ...]
    """Of each stage its replicas' ranks."""

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_replicas(self) -> int:
        return len(self.ranks[0])

    def find(self, rank: int) -> tuple[int, int]:
        """The stage and the replica of a rank."""
        for stage, ranks in enumerate(self.ranks):
            if rank in ranks:
                return stage, ranks.index(rank)
        raise ValueError(f"rank {rank} has no place in stage_to_rank_map {str(self)!r}")

    def name(self, rank: int) -> str:
        stage, replica = self.find(rank)
        return f"rank {rank} (stage {stage}, replica {replica})"

    def __str__(self) -> str:
        return "".join(",".join(map(str, ranks)) + ";" for ranks in self.ranks)


def parse_stage_map(value: str | Sequence[Sequence[int]], world_size: int) -> StageMap:
    """From the text, or from a list of ranks for each stage; every rank of the world once."""
    if isinstance(value, str):
        fields = value.strip().removesuffix(";").split(";")
        words = [[word.strip() for word in field.split(",")] for field in fields]
        if not all(word.isdecimal() for field in words for word in field):
            raise ValueError(f"stage_to_rank_map {value!r}: want ranks as in '0,3;1,4;2,5;'")
        ranks = tuple(tuple(map(int, field)) for field in words)
    else:
        ranks = tuple(tuple(field) for field in value)
    if not ranks or not ranks[0] or any(len(field) != len(ranks[0]) for field in ranks):
        raise ValueError(f"stage_to_rank_map {value!r}: every stage needs as many ranks as stage 0")
    if sorted(rank for field in ranks for rank in field) != list(range(world_size)):
        raise ValueError(
            f"stage_to_rank_map {value!r} must name each of the ranks 0 to {world_size - 1} once"
        )
    return StageMap(ranks=ranks)

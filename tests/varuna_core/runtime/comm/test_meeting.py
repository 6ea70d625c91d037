"""The meeting of ranks: the answer that each gets, whichever comes first."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from varuna_core.runtime.comm.failure import RankFailed
from varuna_core.runtime.comm.meeting import Difference, Given, Meeting
from varuna_core.runtime.given import describe_batch


def meet(given: Sequence[Given | Exception], order: Sequence[int] | None = None) -> list[Any]:
    """Let ranks meet in this order; the answer that each gets, or the error that it raises."""
    store = dist.HashStore()
    meetings = [Meeting(store, "key", rank, range(len(given))) for rank in range(len(given))]

    def come(rank: int) -> Any:
        mine = given[rank]
        try:
            with meetings[rank].refusing():
                if isinstance(mine, Exception):
                    raise mine
            return meetings[rank].compare(mine)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(given)) as pool:
        coming = {rank: pool.submit(come, rank) for rank in order or range(len(given))}
        return [coming[rank].result(20) for rank in range(len(given))]


def test_ranks_that_were_given_the_same_begin() -> None:
    assert meet([{"a": "1"}] * 4) == [None] * 4
    assert Meeting(None, "", 0, [0]).compare({"a": "1"}) is None


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_odd_rank_is_named_to_all(odd: int, order: tuple[int, ...]) -> None:
    told = meet([{"a": "1", "b": "5" if rank == odd else "2"} for rank in range(3)], order)
    (first,) = {answer.text for answer in told}
    assert first.startswith(f"rank {odd}: b 5, on rank ") and first.endswith(" 2")
    assert all(answer.names == ["b"] for answer in told)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
@pytest.mark.parametrize("size", [2, 4])
def test_of_two_halves_the_one_of_rank_0_is_the_usual_one(
    size: int, order: tuple[int, ...]
) -> None:
    given = [{"a": "2" if rank >= size // 2 else "1"} for rank in range(size)]
    told = meet(given, [rank for rank in order if rank < size])
    (text,) = {answer.text for answer in told}
    assert text.endswith("a 2, on rank 0 1") or text.endswith(", on rank 1 1")
    assert ": a 1" not in text


def test_of_many_odd_ranks_some_are_named_and_long_values_are_cut() -> None:
    values = ["x" * 500] * 6 + [str(rank) for rank in range(5)]
    told = meet([{"a": value} for value in values])
    text = told[0].text
    assert isinstance(told[0], Difference) and len(text) < 1000
    assert text.endswith("; and 2 ranks more") or text.startswith("rank ")


def test_one_that_cannot_begin_tells_the_others_at_once() -> None:
    mine = ValueError("no such model")
    told = meet([{}, mine, {}])
    assert told[1] is mine
    for rank in (0, 2):
        assert isinstance(told[rank], RankFailed)
        assert str(told[rank]) == f"rank {rank} cannot begin: rank 1: ValueError: no such model"


def test_who_waits_may_look_around() -> None:
    seen = []

    def look(waited_s: float) -> None:
        seen.append(waited_s)
        raise RuntimeError("it has gone")

    with pytest.raises(RuntimeError, match="it has gone"):
        Meeting(dist.HashStore(), "key", 0, range(2)).compare({}, look)
    assert len(seen) == 1


def test_a_batch_is_told_by_its_shapes_and_its_values() -> None:
    batch = {"x": torch.zeros(2, 3), "n": 4}
    same, other = describe_batch({**batch}), describe_batch({**batch, "x": torch.ones(2, 3)})
    assert describe_batch(batch) == same != other
    assert same["shapes"] == other["shapes"] and same["shapes"].startswith("x float32[2, 3], n ")

"""On which node an attempt failed."""

from __future__ import annotations

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.morph.attempt import find_culprit
from varuna_core.records.exits import RankExit

PLAN = make_plan(make_group("all", 3, 2))
LOST = (
    "[rank3]: varuna_core.failure.RankFailed: rank 3 (stage 3, replica 0) stops: rank 1 (stage 1, "
    "replica 0): ChannelClosed: nothing comes from rank 2: RuntimeError: Connection closed by peer"
)


def make_exit(
    rank: int, error: str = "", *, killed: bool = False, stopped: bool = False
) -> RankExit:
    return RankExit(
        rank=rank,
        node=f"n{rank // 2}",
        code=137 if killed else 1,
        signal="SIGKILL" if killed else None,
        stopped=stopped,
        started=1.0,
        ended=2.0 - rank,
        last_error=error,
    )


def blame(*exits: RankExit) -> int | None:
    missing = sorted(set(range(6)) - {item.rank for item in exits})
    return find_culprit(PLAN, {item.rank: item for item in exits}, missing)


REST = tuple(make_exit(rank, LOST) for rank in (0, 1, 4, 5))


def test_the_node_of_the_rank_that_was_killed() -> None:
    assert blame(*REST, make_exit(2, killed=True), make_exit(3, stopped=True)) == 1


def test_the_node_of_the_rank_that_failed_by_itself_though_others_were_first() -> None:
    error = "[rank2]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert blame(*REST, make_exit(2, error), make_exit(3, LOST)) == 1


def test_the_node_that_left_nothing_where_all_others_felt_it() -> None:
    assert blame(*REST) == 1


def test_nobody_where_several_failed_by_themselves() -> None:
    assert blame(*(make_exit(rank, "ValueError: no such file") for rank in range(6))) is None
    assert blame(make_exit(0, LOST), make_exit(1, LOST)) is None


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes",
        "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_what_a_rank_says_that_lost_another_one_is_fallout(error: str) -> None:
    assert blame(*(make_exit(rank, error) for rank in range(6))) is None
    assert blame(*(make_exit(rank, error) for rank in range(5)), make_exit(5, killed=True)) == 2


def test_nobody_where_all_were_stopped() -> None:
    assert blame(*(make_exit(rank, stopped=True) for rank in range(6))) is None

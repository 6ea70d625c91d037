"""Ranks that are forked begin and end as processes of their own."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.ranks.start import build_order, collect, start_rank, start_ranks

PROGRAM = "tests.ranks.pool_rank"


@pytest.mark.parametrize(
    ("how", "code", "word"),
    [("raises", 1, "KeyError: 'of rank 1'"), ("exits 3", 3, ""), ("ends", 0, "at exit\n")],
)
def test_a_rank_ends_as_a_program_does(how: str, code: int, word: str) -> None:
    with start_ranks(PROGRAM, 2, how) as ranks:
        done = collect(ranks)
    assert [found for found, _ in done] == [code] * 2
    assert word in done[1][1] and "rank 1 of 2" in done[1][1] and "rank 0" not in done[1][1]


def test_ranks_share_no_state() -> None:
    with start_ranks(PROGRAM, 3, "tells") as ranks:
        said = [output.splitlines()[1:] for _, output in collect(ranks)]
    draws, pids, changed, seeds = zip(*said, strict=True)
    assert len(set(draws)) == 3 and pids == tuple(str(rank.pid) for rank in ranks)
    assert set(changed) == {"None"} and len(set(seeds)) == 1


def test_a_signal_is_told_by_its_number() -> None:
    with start_ranks(PROGRAM, 1, "waits") as (rank,):
        assert rank.read_line() == "rank 0 of 1\n"
        assert rank.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(60) == -signal.SIGTERM
        assert rank.read_rest(60) == ""


def test_what_is_left_at_the_end_is_killed() -> None:
    with start_ranks(PROGRAM, 1, "waits") as (rank,):
        pass
    assert rank.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{rank.pid}").exists()


def test_a_rank_has_the_environment_that_it_was_given() -> None:
    rank = start_rank(build_order(PROGRAM, ["env", "0", "1"], {"A": "b"}))
    assert rank.read_rest(60).splitlines()[1:] == ["{'A': 'b'}"]
    rank.close()

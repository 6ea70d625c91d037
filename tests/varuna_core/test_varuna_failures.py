"""One rank fails: all stop within seconds, and each says what happened first and where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks.fail_rank import find_limit
from tests.ranks.start import collect, start_ranks
from varuna_core.runtime.comm.links import NO_TIMEOUT, join_ranks

PROGRAM = "tests.ranks.fail_rank"


def find_error(output: str) -> str:
    """The first error that the others were told of."""
    told = [line for line in output.splitlines() if " RankFailed: " in line]
    assert told, output
    return told[0].partition(" stops: ")[2]


@pytest.mark.parametrize(
    ("how", "world_size"),
    [
        ("raises", 4),
        ("killed", 3),
        ("killed", 4),
        ("leaves", 3),
        ("raises zero 2", 4),
        ("killed zero 1", 4),
        ("raises zero 3", 4),
        ("killed zero 3", 4),
    ],
)
def test_all_ranks_stop_with_the_first_error(tmp_path: Path, how: str, world_size: int) -> None:
    with start_ranks(PROGRAM, world_size, str(tmp_path), how) as ranks:
        done = collect(ranks)
    exits = {"raises": 1, "killed": -9, "leaves": 0}
    how = how.partition(" ")[0]
    assert done[1][0] == exits[how], done[1][1]
    others = [result for rank, result in enumerate(done) if rank != 1]
    for code, output in others:
        assert code == 1 and "step 1" in output and "step 3" not in output, output
    (first,) = {find_error(output) for _, output in others}
    if how == "raises":
        assert "KeyError: 'no such block'" in done[1][1]
        assert first == "rank 1 (stage 1, replica 0): KeyError: 'no such block'"
    elif how == "killed":
        assert "Connection closed by peer" in first or "Connection reset" in first
    else:
        assert "cannot receive from rank 1" in first or "Connection closed" in first


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("refuses", "KeyError: 'no such layer'", "cannot begin: rank 1: KeyError: 'no such layer'"),
        ("unlike", "rank 1: schedule 'gpipe', on rank", "rank 1: schedule 'gpipe', on rank"),
    ],
)
def test_a_rank_that_cannot_begin_as_the_others_ends_all(
    tmp_path: Path, how: str, own: str, others: str
) -> None:
    with start_ranks(PROGRAM, 3, str(tmp_path), how) as ranks:
        done = collect(ranks)
    assert [code for code, _ in done] == [1, 1, 1]
    assert own in done[1][1] and others in done[0][1] and others in done[2][1]


@pytest.mark.parametrize("how", ["lingers", "lingers zero 1", "lingers zero 3"])
def test_a_rank_that_fails_and_lives_on_holds_up_nobody(tmp_path: Path, how: str) -> None:
    with start_ranks(PROGRAM, 4, str(tmp_path), how) as ranks:
        others = collect([ranks[0], ranks[2], ranks[3]])
        assert ranks[1].poll() is None
        for code, output in others:
            assert code == 1 and "KeyError: 'no such block'" in find_error(output)


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    with start_ranks(PROGRAM, 3, str(tmp_path), "hangs") as ranks:
        for code, output in collect([ranks[0], ranks[2]]):
            assert code == 1 and "step 1" in output, output
            assert "no message to or from rank 1 for 20 s" in find_error(output), output
        assert ranks[1].poll() is None


@pytest.mark.parametrize("how", ["destroys", "forgets"])
def test_a_run_without_close_ends_well(tmp_path: Path, how: str) -> None:
    """Whether the user takes down torch.distributed or not."""
    with start_ranks(PROGRAM, 3, str(tmp_path), how) as ranks:
        for code, output in collect(ranks):
            assert code == 0 and output.endswith("step 3\n"), output


@pytest.mark.parametrize("how", ["limits", "limits 77"])
def test_all_collectives_have_the_limit_that_was_given_or_none(tmp_path: Path, how: str) -> None:
    with start_ranks(PROGRAM, 4, str(tmp_path), how) as ranks:
        for code, output in collect(ranks):
            assert code == 0, output
            found = dict(line.rsplit(" ", 1) for line in output.strip().splitlines())
            assert found.pop("kept after close") == "0", "a group that is held keeps its threads"
            assert found.keys() == {"pipeline", "replicas", "tensor", "sharing (0, 1)"}
            limits = {name: float(limit) for name, limit in found.items() if limit != "None"}
            assert limits.keys() == {"pipeline", "replicas", "sharing (0, 1)"}
            for name, limit in limits.items():
                assert limit == 77 if "77" in how else limit > 30 * 24 * 3600, name


def test_a_save_that_takes_longer_than_the_limit_ends_no_run(tmp_path: Path) -> None:
    """The first replica alone writes; the other one's next step waits for it."""
    with start_ranks(PROGRAM, 4, str(tmp_path), "saves") as ranks:
        for code, output in collect(ranks):
            assert code == 0 and output.endswith("step 3\n"), output


def test_the_group_that_varuna_joins_has_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's half hour holds for the meeting alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    join_ranks()
    try:
        assert find_limit(dist.distributed_c10d._get_default_group()) == NO_TIMEOUT.total_seconds()
    finally:
        dist.destroy_process_group()

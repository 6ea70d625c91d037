"""Two ranks of which one differs: each names the difference, in place of a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.mismatch_rank import KINDS
from tests.ranks.start import Rank, start_ranks


def is_told(rank: Rank, words: str) -> bool:
    while line := rank.read_line():
        if words in line:
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_differs_is_named_on_all(tmp_path: Path, kind: str) -> None:
    with start_ranks("tests.ranks.mismatch_rank", 2, str(tmp_path), kind) as ranks:
        waiting = ranks[:1] if kind == "never steps" else ranks
        assert all(is_told(rank, KINDS[kind][1]) for rank in waiting)

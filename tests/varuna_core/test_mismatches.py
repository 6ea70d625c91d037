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
        setup, words = KINDS[kind]
        waiting = [r for n, r in enumerate(ranks) if n != setup.odd or not setup.is_silent]
        assert all(is_told(rank, words) for rank in waiting)

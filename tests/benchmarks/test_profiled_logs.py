"""Small staged logs with calls: the right finding first, and the step that status has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.commands.profiled_logs import Logged, judge

SMALL = Logged(
    stages=4, replicas=4, micros=8, ranks_per_node=4, layers=(4,) * 4, layer_s=0.01, steps=15,
    log_every=5, nodes=("n1", "n2", "n3", "n4"),
)  # fmt: skip


KINDS = ("NVIDIA A100", "NVIDIA A100", "NVIDIA A10", "NVIDIA A100")


@pytest.mark.parametrize(
    ("job", "wanted", "part"),
    [
        (SMALL, "", "none"),
        (replace(SMALL, slow=dict.fromkeys((2, 6, 10, 14), 1.6), kinds=KINDS), "", "none"),
        (replace(SMALL, slow={6: 1.5}), "straggler", "Rank 6 on n2 takes 1.5"),
        (replace(SMALL, layers=(4, 4, 6, 2)), "partition", "the partition 4-4-4-4 in place"),
        (replace(SMALL, skew_s={2: -0.35}), "clock wrong", "The clock of n3 is behind by 350 ms"),
        (replace(SMALL, cut=0.3), "cut steps", "Steps 11 to 15 are left out: n4.out does not"),
        (replace(SMALL, cut=0.8), "cut steps", "Steps 11 to 15 are left out: n4.out does not"),
        (replace(SMALL, missing=(1,)), "missing logs", "NODE_RANK 1, ranks 4 to 7."),
        (replace(SMALL, missing=(3,)), "missing logs", "NODE_RANK 3"),
        (replace(SMALL, is_tagged=True, slow={6: 1.5}), "straggler", "Rank 6 on n2"),
        (replace(SMALL, gathers_ranks=True, slow={6: 1.5}), "straggler", "Rank 6 on an unknown"),
        (replace(SMALL, prints_starts=False, slow={6: 1.5}), "straggler", "Rank 6 on n2"),
        (SMALL, "other job", "m01, m02, with the master 192.168.120.90"),
        (replace(SMALL, layers=(4, 4, 6, 2), slow={5: 2.0}), "straggler", "Rank 5 on n2"),
    ],
)
def test_what_is_wrong_comes_first_and_the_step_is_known(
    tmp_path: Path, job: Logged, wanted: str, part: str
) -> None:
    row = judge("staged", job, wanted, tmp_path)
    assert (row.rule, row.is_right) == (wanted, True)
    assert part in row.said

"""Reasons that never pass, and those that do."""

from __future__ import annotations

import pytest

from jobs.pending import explain_reason
from jobs.slurm import JobInfo, JobState


def pending(reason: str) -> list[JobInfo]:
    return [JobInfo(id="7", state=JobState.PENDING, word="PENDING", reason=reason)]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("PartitionConfig", "count"),
        ("PartitionTimeLimit", "walltime_min"),
        ("QOSMaxNodePerJobLimit", "limit"),
        ("AssocMaxWallDurationPerJobLimit", "limit"),
        ("BadConstraints", "constraint"),
    ],
)
def test_a_reason_that_never_passes_has_a_remedy(reason: str, word: str) -> None:
    assert word in explain_reason(pending(reason))


@pytest.mark.parametrize("reason", ["", "Priority", "Resources", "BeginTime", "Dependency"])
def test_a_reason_that_passes_is_no_trouble(reason: str) -> None:
    assert explain_reason(pending(reason)) == ""

"""Jobs and lists of nodes in the terms that all schedulers share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from varuna_core.facts.known import Evidence, NotKnown, Value
from varuna_core.records.formatting import fold_names
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.node_names import expand_nodes


@pytest.mark.parametrize(
    "text",
    [
        "a[1-2,4],login",
        "n[008-011]",
        "a9",
        "local[0-3]",
        "rack1n[1-2],rack2n[1-2]",
        "",
        "hosts.txt",
    ],
)
def test_a_list_of_nodes_folds_as_it_was(text: str) -> None:
    assert fold_names(expand_nodes(text)) == text


def test_a_limit_that_an_admin_changed_shows() -> None:
    """Status took it from our own script, and went on with 2 minutes where Slurm had 10."""
    job = SchedulerJob(
        id="7", state=JobState.RUNNING, native_word="RUNNING", start=1000.0, asked=1061.0,
        left=Value(538.0, (Evidence("squeue"),)),
    )  # fmt: skip
    assert job.limit == Value(600.0, (Evidence("squeue"),))
    assert isinstance(replace(job, left=NotKnown("UNLIMITED")).limit, NotKnown)
    assert isinstance(replace(job, state=JobState.PENDING).limit, NotKnown)

"""The conf that a function runs with: its checkpoint protocol, where the layout allows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from vjob.jobs.api.executor import VjobExecutor

NODES = [{"group": "a", "ranks": 2}, {"group": "b"}]


class Saving:
    def __call__(self) -> None:
        pass

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(self)


@pytest.mark.parametrize(("hetero", "comes_again"), [("hetjob", True), ("split", False)])
def test_a_function_with_a_checkpoint_comes_again_where_its_job_can(
    tmp_path: Path, hetero: str, comes_again: bool
) -> None:
    """The jobs of a split run would be requeued one by one: that conf is refused."""
    executor = VjobExecutor(tmp_path)
    cluster = {"scheduler": "slurm", "hetero": hetero, "nodes": NODES}
    executor.update_parameters(conf={"name": "x", "cluster": cluster})
    found = executor.resolve_function(DelayedSubmission(Saving())).conf.cluster
    assert (found.requeue, found.signal_before_end_s) == (comes_again, 90)
    executor.update_parameters(set={"cluster.signal_before_end_s": 30})
    found = executor.resolve_function(DelayedSubmission(print)).conf.cluster
    assert (found.requeue, found.signal_before_end_s) == (comes_again, 30), "preempted, as submitit"
    executor.update_parameters(set={"cluster.requeue": False})
    found = executor.resolve_function(DelayedSubmission(print)).conf.cluster
    assert (found.requeue, found.signal_before_end_s) == (False, 0)

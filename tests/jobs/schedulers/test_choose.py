"""Defaults of a conf that depend on the scheduler."""

from __future__ import annotations

import pytest

from vjob.jobs.conf.schema import Cluster
from vjob.jobs.schedulers import choose


@pytest.mark.parametrize(
    ("has_slurm", "cluster", "written", "scheduler", "limit_min"),
    [
        (False, Cluster(), ["name"], "local", None),
        (True, Cluster(), ["name"], "local", None),
        (True, Cluster(), ["cluster.grace_s"], "local", None),
        (True, Cluster(), ["cluster.nodes"], "slurm", 60),
        (True, Cluster(account="a"), ["cluster.account"], "slurm", 60),
        (True, Cluster(scheduler="slurm"), ["cluster.scheduler"], "slurm", 60),
        (True, Cluster(walltime_min=7), ["cluster.nodes"], "slurm", 7),
        (True, Cluster(scheduler="local", walltime_min=7), [], "local", 7),
        (True, Cluster(scheduler="local"), ["cluster.nodes"], "local", None),
        (True, Cluster(machine_list="machines"), ["cluster.nodes"], "ssh", None),
    ],
)
def test_a_conf_that_asks_a_queue_for_nothing_runs_here_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
    has_slurm: bool,
    cluster: Cluster,
    written: list[str],
    scheduler: str,
    limit_min: int | None,
) -> None:
    found = choose.get_scheduler("slurm" if has_slurm else "local")
    monkeypatch.setattr(choose, "choose_auto", lambda: found)
    settled = choose.settle_cluster(cluster, written)
    assert choose.choose_for(settled).name == scheduler
    assert settled.walltime_min == limit_min

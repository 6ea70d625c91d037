"""Nodes whose manager is gone for good: on Slurm, when the batch script's node was taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import wait_until
from tests.varuna_core.morph.test_manager import HANGS_AT_FIRST, TRAINS, Elastic
from varuna_core.morph import node_daemon as hearing


@pytest.mark.slow
def test_nodes_give_the_job_back(tmp_path: Path) -> None:
    """They waited for orders until the time limit, and held their job's nodes."""
    elastic = Elastic(tmp_path, HANGS_AT_FIRST + TRAINS)
    try:
        manager = elastic.start("manage")
        given = [tmp_path / f"given back {index}" for index in range(3)]
        nodes = [
            elastic.start("stay", "--node", str(i), "--orphaned", f"touch '{given[i]}'", node=i)
            for i in range(3)
        ]
        wait_until(lambda: elastic.has_started(0), "the first attempt")
        manager.kill()
        for node in nodes:
            _, err = node.communicate(timeout=120 + hearing.RETURN_S)[:2]
            assert "nobody owns the run" in err
        assert all(path.exists() for path in given)
    finally:
        elastic.end()

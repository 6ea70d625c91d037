"""DeepSpeed on the real Slurm of the lab: two nodes, no ssh, our own start of its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob
from tests.deepspeed_run import CONF, check_runs, find_python

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_deepspeed_trains_over_two_nodes(clean_lab: Lab, tmp_path: Path) -> None:
    """In ZeRO's second stage; the first one is tested on this machine."""
    python = find_python()
    vjob = Vjob(tmp_path, clean_lab.env)
    config = {"zero_optimization": {"reduce_bucket_size": 5000}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = vjob.submit(CONF.format(python=python, stage=2, scheduler="slurm", count=2, ranks=1))
    check_runs(vjob, run, 2)

"""One seed of chaos on the Slurm lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.faults import draw_faults
from benchmarks.chaos.lab_testbed import LabTestbed
from tests.benchmarks.test_chaos import run_and_check
from tests.cluster.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.long]


def test_on_slurm(clean_lab: Lab, tmp_path: Path) -> None:
    kinds = ("power off", "kill manager")
    run_and_check(LabTestbed(tmp_path, clean_lab), 6, draw_faults(6, 2, kinds), "lab")

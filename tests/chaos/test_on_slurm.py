"""A seed of chaos on the lab, for every run of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import draw
from tests.chaos.lab_stage import LabStage
from tests.chaos.test_chaos import play_well
from tests.cluster.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.slurm]


def test_on_slurm(clean_lab: Lab, tmp_path: Path) -> None:
    kinds = ("power off", "kill manager")
    play_well(LabStage(tmp_path, clean_lab), 6, draw(6, 2, kinds), "lab")

"""A job that asks for a range of nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_morph import CONF
from tests.command import Vjob

pytestmark = pytest.mark.slurm


def test_a_job_that_could_start_with_fewer_nodes_gets_all_that_are_idle(
    clean_lab: Lab, tmp_path: Path
) -> None:
    """It got the fewest: `--ntasks-per-node` had the tasks counted, of the smallest number."""
    for ending in ("bin", "idx"):
        (tmp_path / f"text.{ending}").touch()
    vjob = Vjob(tmp_path, clean_lab.env)
    said = vjob("submit", vjob.write(CONF), "--dry-run").stdout
    options = re.findall(r"^\s*(#SBATCH .*)$", said, re.MULTILINE)
    assert "#SBATCH --nodes=2-4" in options
    script = tmp_path / "range.sh"
    script.write_text("\n".join(["#!/bin/sh", *options, "true", ""]))
    done = clean_lab.run(["sbatch", "--test-only", str(script)])
    assert "using 4 processors on nodes b[1-4]" in done.stdout + done.stderr

"""submitit's calls on the real Slurm of the lab; the rest of them, on this machine, are in
tests/jobs/api/test_submitit_calls.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob
from tests.plugin import write_metadata

pytestmark = pytest.mark.slurm


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    vjob = Vjob(tmp_path, clean_lab.env)
    write_metadata(tmp_path / "plugin")
    vjob.env["PYTHONPATH"] = os.pathsep.join((str(tmp_path / "plugin"), str(ROOT)))
    return vjob


def run(vjob: Vjob, program: str, *words: str) -> dict[str, Any]:
    """What the program printed last."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / "from_python" / program, *words],
        cwd=vjob.folder, env=vjob.env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.row("on Slurm: torch over nodes, arrays, errors, cancel, checkpoints")
@pytest.mark.row("on Slurm: a preempted function without `checkpoint()`")
def test_a_script_of_submitits_runs_on_slurm(vjob: Vjob) -> None:
    found = run(vjob, "submitit_calls.py")
    hosts = [host for host, _ in found["meeting"]]
    assert len(set(hosts)) == 2 and [total for _, total in found["meeting"]] == [6.0] * 4
    assert found["meeting, task 3"] == found["meeting"][3] and found["tasks"] == 4
    assert found["nodes"]
    base = found["ids"][0].partition("_")[0]
    assert found["ids"] == [f"{base}_{number}" for number in range(3)]
    assert found["as completed"] == [0, 7, 10, 40, 90]
    assert "ZeroDivisionError" in found["error"] and "in inverse" in found["error"]
    assert found["done"] is False and found["cancelled"] == "CANCELLED"
    assert (found["fit"], found["model"]) == (0.5, 5.0)
    assert found["said"] == [
        "starting from stage '0'",
        "checkpoint at stage 'scale'",
        "starting from stage 'scale'",
    ]
    assert found["twice"] == 2


@pytest.mark.long
def test_a_folder_that_no_node_sees_and_a_job_that_is_not_ours(vjob: Vjob, clean_lab: Lab) -> None:
    found = run(vjob, "bad_places.py", str(clean_lab.paths.local / "log"))
    assert "a job that vjob did not submit has no run" in found["theirs"]
    assert "is log_folder on a file system that the nodes see" in found["unseen"]
    assert "vjob status" in found["unseen"] and len(found["unseen"].splitlines()) == 2
    assert found["state"] == "FAILED"

"""Stacks of a Slurm job that vjob did not submit: the agent travels on standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import wait_for
from varuna_core.agent.stacks import find_job_processes
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.stacks.group import render_stacks
from vjob.jobs.monitor.stacks.plain_job import collect_job_stacks
from vjob.jobs.schedulers.foreign_job import ForeignJob, JobPart
from vjob.jobs.schedulers.job import JobState, SchedulerJob

NUMBER = f"88{os.getpid()}"
SRUN = f"""#!/bin/sh
while [ "$1" != sh ]; do shift; done
export SLURM_STEP_ID=77 SLURM_JOB_ID={NUMBER} SLURMD_NODENAME=nodeX
exec "$@"
"""
PART = JobPart(
    info=SchedulerJob(id=NUMBER, state=JobState.RUNNING, native_word="RUNNING", nodes=("nodeX",)),
    raw_id=NUMBER, uid=os.geteuid(), started=1.0,
)  # fmt: skip
CODE = "import time\ndef train():\n    time.sleep(300)\ntrain()"


def make_job(part: JobPart) -> ForeignJob:
    return ForeignJob(scheduler="slurm", word=NUMBER, parts=(part,), asked=0.0)


def test_a_step_beside_the_job_sees_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.access(Path(sys.executable).with_name("py-spy"), os.X_OK):
        pytest.skip("py-spy is not installed")
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    env = {**os.environ, "SLURM_JOB_ID": NUMBER, "SLURM_PROCID": "2"}
    child = subprocess.Popen([sys.executable, "-c", CODE], env=env)
    try:
        wait_for(lambda: find_job_processes([NUMBER], ""), 60)
        found: list[str] = []

        def is_training() -> bool:
            found.append(render_stacks(collect_job_stacks(make_job(PART), timeout_s=120)))
            return "train" in found[-1]

        wait_for(is_training, 120)
        assert "1 of 1 ranks" in found[-1] and "rank 2 on nodeX" in found[-1]
    finally:
        child.kill()
        child.wait()


def test_what_does_not_run_or_belongs_to_another_is_not_looked_at() -> None:
    with pytest.raises(InputError, match="belongs to user ann"):
        collect_job_stacks(make_job(replace(PART, user="ann", uid=os.geteuid() + 1)))
    pends = replace(PART.info, state=JobState.PENDING, native_word="PENDING")
    with pytest.raises(InputError, match="is not running: PENDING"):
        collect_job_stacks(make_job(replace(PART, info=pends)))

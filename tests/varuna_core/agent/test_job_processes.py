"""Python processes of a Slurm job, by what Slurm puts into their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.command import wait_for
from varuna_core.agent.stacks import find_job_processes

SLEEPER = "import time; time.sleep(300)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        os.killpg(child.pid, 9)
        child.wait()


def start(children: list[subprocess.Popen[bytes]], code: str, **env: str) -> int:
    words = [sys.executable, "-c", code]
    child = subprocess.Popen(words, env={**os.environ, **env}, start_new_session=True)
    children.append(child)
    return child.pid


def test_the_topmost_python_of_each_task_counts_and_our_own_step_does_not(
    started: list[subprocess.Popen[bytes]],
) -> None:
    job = f"99{os.getpid()}"
    plain = start(started, PARENT, SLURM_JOB_ID=job, SLURM_PROCID="3", SLURM_STEP_ID="0")
    launcher = start(started, SLEEPER, SLURM_JOB_ID=job, SLURM_PROCID="4", SLURM_STEP_ID="0")
    ranks = [
        start(started, SLEEPER, SLURM_JOB_ID=job, SLURM_PROCID="4", SLURM_STEP_ID="0", RANK=rank)
        for rank in ("8", "9")
    ]
    start(started, SLEEPER, SLURM_JOB_ID=job, SLURM_PROCID="0", SLURM_STEP_ID="7")
    start(started, SLEEPER, SLURM_JOB_ID=job + "1", SLURM_PROCID="0")
    wanted = [(3, plain), (8, ranks[0]), (9, ranks[1])]
    wait_for(lambda: find_job_processes([job], "7") == wanted, 60)
    assert launcher not in [pid for _, pid in find_job_processes([job], "7")]

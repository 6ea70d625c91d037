"""Starts the ranks of a test as processes, waits for them with a deadline, ends what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 270.0
"""Bounds a hang on a machine that is busy with something else."""


@contextmanager
def start_ranks(
    module: str, world_size: int, *arguments: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """`python -m <module> <arguments> <rank> <world size>`, a process a rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(rank), str(world_size)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in ranks:
            rank.communicate()


def collect(
    ranks: Sequence[subprocess.Popen[str]], timeout_s: float = DEADLINE_S
) -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    deadline = time.monotonic() + timeout_s
    done = []
    for rank in ranks:
        output, _ = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
        done.append((rank.returncode, output))
    return done

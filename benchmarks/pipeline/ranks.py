"""Processes of a measurement: one a rank, started here, joined there, each on a core of its own.

parent: run_ranks(module, options) ──► rank 0..n-1: serve(work) ──► work(options, rank, world)
        ◄──────────────────────── what rank 0's work returned, as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
TAIL_LINES = 12
POLL_S = 0.05


class RanksFailed(RuntimeError):
    """A rank ended with an error, or not in time."""


def run_ranks(
    module: str,
    num_ranks: int,
    options: dict[str, Any],
    *,
    prefixes: Sequence[Sequence[str]] = (),
    environment: dict[str, str] | None = None,
    timeout_s: float = 1800.0,
) -> Any:
    """`python -m <module>` once a rank; `prefixes` are commands to start each rank with."""
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="pipeline-") as name:
        folder = Path(name)
        ranks = []
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            with (folder / f"{rank}.out").open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        [
                            *(prefixes[rank] if prefixes else ()),
                            *(sys.executable, "-m", module, json.dumps(options), name),
                        ],
                        cwd=ROOT,
                        env={**os.environ, **quiet, **own, **(environment or {})},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            _wait(ranks, folder, deadline)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return json.loads((folder / "result.json").read_text())


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for rank, process in enumerate(ranks):
        if process.poll() != 0:
            what = "is still running" if process.poll() is None else f"exited {process.returncode}"
            tail = (folder / f"{rank}.out").read_text().splitlines()[-TAIL_LINES:]
            if process.poll() is not None or time.monotonic() > deadline:
                raise RanksFailed(f"rank {rank} {what}:\n" + "\n".join(tail))


def serve(work: Callable[[dict[str, Any], int, int], Any]) -> None:
    """In a rank: join the others, work, leave the result."""
    options, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = work(options, rank, world)
    dist.barrier()
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # peers' libraries (DeepSpeed) leave threads and groups that take seconds to end


def pin(rank: int) -> None:
    """This thread, the one that computes, onto a core of its own.

    To be called when all groups are made: gloo's threads would inherit it, and wait for the core
    that their own process keeps busy (milliseconds a message).
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def gather(value: Any, world: int) -> list[Any]:
    """Everybody's value, in order of the ranks."""
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values

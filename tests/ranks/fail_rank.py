"""One rank of a run that fails, for tests: `fail_rank.py <folder> <how> <rank> <world size>`.

Prints `step <n>` after each step and the error that ended it. Rank 1 fails in step 2, if `how`
says so; `killed zero 1` is with ZeRO.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.models.small import Gpt, make_inputs
from varuna_core import Varuna

HANG_TIMEOUT_S = 20.0


class FailingGpt(Gpt):
    """Fails in its second block when told to."""

    failing = False

    def run_block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if self.failing and number == 1:
            raise KeyError("no such block")
        return super().run_block(number, x)


def main() -> None:
    folder, how, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    how, _, zero = how.partition(" zero ")
    torch.set_num_threads(1)
    store: dist.Store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    torch.manual_seed(0)
    stage_map = "0,2;1,3;" if world == 4 else "".join(f"{r};" for r in range(world))
    varuna = Varuna(
        FailingGpt(),
        stage_map,
        make_inputs(),
        8,
        1,
        device="cpu",
        schedule="1f1b",
        zero=int(zero or 0),
        hang_timeout_s=HANG_TIMEOUT_S if how == "hangs" else None,
    )
    size = 8 // varuna.stage_map.num_replicas
    for step in range(4):
        if rank == 1 and step == 2:
            if how == "killed":
                os.kill(os.getpid(), 9)
            if how == "lingers" or how == "raises":
                varuna.part.stages[0].module.failing = True  # type: ignore[assignment]  # ours
            if how == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "leaves":
                return
        try:
            varuna.step(make_inputs(size))
        except Exception as error:
            print(f"{time.time()} {type(error).__name__}: {error}", flush=True)
            if how == "lingers" and rank == 1:
                time.sleep(600)
            raise
        print(f"step {step}", flush=True)
    if how == "destroys":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

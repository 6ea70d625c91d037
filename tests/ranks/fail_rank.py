"""One rank of a run that fails, for tests: `fail_rank.py <folder> <how> <rank> <world size>`.

Prints `step <n>` after each step and the error that ended it. Rank 1 fails in step 2, if `how`
says so; `killed zero 1` is with ZeRO.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.models.small import Gpt, TiedGpt, make_inputs
from varuna_core import Varuna
from varuna_core.checkpoint.store.writer import CheckpointWriter
from varuna_core.runtime.comm.links import Links

HANG_TIMEOUT_S = 20.0
SAVES = {"saves": 8.0, "limits 77": 77.0}
"""How many seconds a rank waits for another one; a save of the first rank takes half as much again.
"""


class FailingGpt(Gpt):
    """Fails in its second block when told to."""

    failing = False

    def run_block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if self.failing and number == 1:
            raise KeyError("no such block")
        return super().run_block(number, x)


def refuse_to_run(self: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such layer")


write = CheckpointWriter.save


def save_slowly(writer: CheckpointWriter, *args: Any, **options: Any) -> Any:
    time.sleep(SAVES["saves"] * 1.5)
    return write(writer, *args, **options)


def find_limit(group: Any) -> float:
    """Seconds after which a collective of the group fails."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def list_groups(links: Links) -> dict[str, Any]:
    groups = {"pipeline": links.pipeline, "replicas": links.replicas, "tensor": links.tensor}
    return groups | {f"sharing {places}": group for places, group in links.sharing.items()}


def main() -> None:
    folder, how, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    how, _, zero = how.partition(" zero ")
    torch.set_num_threads(1)
    store: dist.Store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    torch.manual_seed(0)
    if how == "refuses" and rank == 1:
        FailingGpt.run_block = refuse_to_run  # type: ignore[assignment]
    stage_map = "0,2;1,3;" if world == 4 else "".join(f"{r};" for r in range(world))
    varuna = Varuna(
        TiedGpt() if how.startswith("limits") else FailingGpt(),
        stage_map,
        make_inputs(),
        8,
        1,
        device="cpu",
        schedule="gpipe" if how == "unlike" and rank == 1 else "1f1b",
        zero=int(zero or 0),
        hang_timeout_s=HANG_TIMEOUT_S if how == "hangs" else SAVES.get(how),
    )
    if how.startswith("limits"):
        held = []
        for name, group in list_groups(varuna.links).items():
            print(name, group and find_limit(group))
            held.append(weakref.ref(group) if group else lambda: None)
        del group
        varuna.close()
        print("kept after close", sum(group() is not None for group in held))
        return
    if how == "saves" and rank == 0:
        CheckpointWriter.save = save_slowly  # type: ignore[method-assign]
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
            if how == "saves" and step == 1:
                varuna.checkpoint(f"{folder}/ckpt")
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

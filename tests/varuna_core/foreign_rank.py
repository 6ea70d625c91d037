"""Trains every foreign model in every layout: `python -m tests.varuna_core.foreign_rank <folder>`.

The ranks are forks of one process, since a start of each takes longer than all of the training.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.varuna_core.foreign import BUILD, make_text
from varuna_core import Varuna

RATE, STEPS, BATCH, CHUNK = 0.1, 3, 8, 2
LAYOUTS = {2: "0;1;", 4: "0,1;2,3;"}
"""The stages' ranks by world size."""


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return BUILD[name]().train()


def train(folder: Path, rank: int, world: int) -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in BUILD:
        varuna = Varuna(build(name), LAYOUTS[world], make_text(CHUNK), BATCH, CHUNK, device="cpu")
        optimizer = torch.optim.SGD(varuna.parameters(), lr=RATE)
        varuna.set_optimizer(optimizer)
        losses = []
        held = slice(varuna.samples.start, varuna.samples.stop)
        for step in range(STEPS):
            batch = {key: value[held] for key, value in make_text(BATCH, step).items()}
            losses.append(varuna.step(batch)[0])
            optimizer.step()
            varuna.zero_grad()
        result = {"losses": torch.stack(losses), "state": varuna.state_dict()}
        torch.save(result, folder / f"{name}.{rank}.pt")
        varuna.close()
    dist.barrier()
    dist.destroy_process_group()


def fork(folder: Path, rank: int, world: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        train(folder, rank, world)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in BUILD:
        build(name)
    codes = []
    for world in LAYOUTS:
        folder = Path(sys.argv[1]) / str(world)
        folder.mkdir()
        ranks = [fork(folder, rank, world) for rank in range(world)]
        codes += [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()

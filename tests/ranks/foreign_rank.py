"""Trains every foreign model in every layout: `python -m tests.ranks.foreign_rank <folder>`.

The ranks are forks of one process, since a start of each takes longer than all of the training.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.models.foreign import BUILD, LIBRARY, is_installed, make_text
from tests.ranks.start import DEADLINE_S
from varuna_core import Varuna

RATE, STEPS, BATCH, CHUNK = 0.1, 3, 8, 2
LAYOUTS = {2: "0;1;", 4: "0,1;2,3;"}
"""The stages' ranks by world size; a world of one trains the plain model."""


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return BUILD[name]().train()


def train_plain(name: str) -> dict[str, Any]:
    """On the same micro-batches."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        batch, total = make_text(BATCH, step), torch.zeros(())
        for begin in range(0, BATCH, CHUNK):
            micro = {key: value[begin : begin + CHUNK] for key, value in batch.items()}
            out: Any = model(**micro)
            loss = getattr(out, "loss", out) * (CHUNK / BATCH)
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    tensors = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    return {"losses": torch.stack(losses), "state": tensors}


def train_staged(name: str, layout: str) -> dict[str, Any]:
    varuna = Varuna(build(name), layout, make_text(CHUNK), BATCH, CHUNK, device="cpu")
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
    varuna.close()
    return result


def train(folder: Path, rank: int, world: int) -> None:
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in filter(is_installed, BUILD):
        result = train_plain(name) if world == 1 else train_staged(name, LAYOUTS[world])
        torch.save(result, folder / f"{name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def fork(folder: Path, rank: int, world: int, run: Callable[[Path, int, int], None] = train) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run(folder, rank, world)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in filter(is_installed, BUILD):  # imports what the forks will need
        if LIBRARY[name] == "transformers":
            build(name)
    codes = []
    for world in (1, *LAYOUTS):
        folder = Path(sys.argv[1]) / str(world)
        folder.mkdir()
        ranks = [fork(folder, rank, world) for rank in range(world)]
        codes += [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()

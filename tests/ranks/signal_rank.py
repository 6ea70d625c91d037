"""One rank of a training that signals end, for tests: `signal_rank.py <folder> <words> <rank>
<world size>`. The words: what it does about signals, its stage map, its steps.

Takes up what is in the store, prints a line a step, and exits as the runtime or its handler says.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.models.small import TiedGpt, make_inputs
from tests.ranks.train_rank import cut_batch
from varuna_core import Varuna
from varuna_core.checkpoint.format.errors import NoCheckpoint
from varuna_core.checkpoint.store.store import SaveFolder

BATCH, EVERY = 8, 2
"""The batch, and how many steps' gradients are added up."""


def train(folder: Path, how: str, stage_map: str, steps: int, say: Any = print) -> list[float]:
    torch.manual_seed(0)
    varuna = Varuna(TiedGpt(), stage_map, make_inputs(), BATCH, 2, device="cpu", schedule="1f1b")
    optimizer = torch.optim.AdamW(varuna.parameters(), lr=0.01, eps=1e-3)
    varuna.set_optimizer(optimizer)
    store = folder / "ckpt"
    if how == "plain":
        varuna.save_on_signal(store, keep=2)
    elif how == "handler":

        def handler(number: int, frame: Any) -> None:
            varuna.checkpoint(store, varuna.iteration)
            sys.exit()

        signal.signal(signal.SIGUSR1, handler)
        signal.signal(signal.SIGUSR2, handler)
    elif how == "killed":
        kill_itself(varuna)
    try:
        say(f"loaded {varuna.load_checkpoint(store)}", flush=True)
    except NoCheckpoint:
        say("from the start", flush=True)
    losses = []
    held = range(varuna.samples.start, varuna.samples.stop)
    for step in range(varuna.iteration, steps):
        if how == "killed" and step % 4 == 0:
            varuna.checkpoint(store, on_demand=True)
        batch = make_inputs(BATCH, seed=step)
        loss, _ = varuna.step(cut_batch(batch, BATCH, held))
        losses.append(loss.item())
        if step % EVERY == EVERY - 1:
            optimizer.step()
            varuna.zero_grad()
        say(f"step {step} {loss.item():.9g}", flush=True)
    varuna.close()
    return losses


def kill_itself(varuna: Varuna) -> None:
    """Rank 1, when it has written its part of the second checkpoint and not said so."""
    mark, rank = SaveFolder.mark, dist.get_rank()

    def mark_or_die(self: SaveFolder, marker: Any) -> None:
        if rank == 1 and self.save.iteration == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        mark(self, marker)

    SaveFolder.mark = mark_or_die  # type: ignore[method-assign]  # this process alone


def main() -> None:
    folder, (how, stage_map, steps) = Path(sys.argv[1]), sys.argv[2].split()
    rank, world = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store {sys.argv[2]}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    train(folder, how, stage_map, int(steps))


if __name__ == "__main__":
    main()

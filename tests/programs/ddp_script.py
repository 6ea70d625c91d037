"""A script without Varuna that may morph: torch's DDP, checkpoints of its own.

python ddp_script.py STEPS

The file `limit` has the step at which it waits for a test, if it is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from varuna_core import DataPlace, leaving
from varuna_core.programs.dynamo import spare_dynamo

FILE = Path("own.pt")
LIMIT = Path("limit")
NUM_SAMPLES, BATCH = 200, 24


def is_at_limit(step: int) -> bool:
    return LIMIT.exists() and step >= int(LIMIT.read_text() or 0)


def main() -> None:
    leaving.listen()
    spare_dynamo()  # seconds of each rank, and nothing here compiles
    steps = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = torch.randn(NUM_SAMPLES, 8, dtype=torch.float64)
    wanted = data.sin().sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    place = DataPlace(NUM_SAMPLES, BATCH, seed=3)
    if FILE.exists():
        state = torch.load(FILE)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        place.load_state_dict(state["place"])

    def save() -> None:
        if dist.get_rank() == 0:
            state = {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "place": place.state_dict(),
            }
            torch.save(state, f"{FILE}.part")
            os.replace(f"{FILE}.part", FILE)
        dist.barrier()

    while place.step < steps:
        while is_at_limit(place.step) and not leaving.is_asked():
            time.sleep(0.05)
        mine = place.list_samples()
        loss = nn.functional.mse_loss(model(data[mine]), wanted[mine]) * place.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        place.advance()
        whole = loss.detach() / dist.get_world_size()
        dist.all_reduce(whole)
        if dist.get_rank() == 0:
            print(f"step {place.step}/{steps} loss {whole.item():.15g}", flush=True)
        if place.step % 10 == 0:
            save()
        if leaving.is_time():
            save()
            leaving.leave()
    save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

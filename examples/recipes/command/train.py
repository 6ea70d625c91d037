"""Trains a tiny network by torch's DistributedDataParallel, on GPUs where there are some."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
args = parser.parse_args()

has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "w", buffering=1)
print(json.dumps({"rank": rank, "world": world}), file=losses)

torch.manual_seed(0)  # the same weights on all ranks
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + rank)  # other samples on each
for step in range(1, args.steps + 1):
    batch = torch.randn(16, 8).to(device)
    loss = nn.functional.mse_loss(model(batch), batch.sin().sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
    print(json.dumps({"step": step, "loss": loss.item(), "at": time.time()}), file=losses)
    if rank == 0 and step % 5 == 0:
        print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()

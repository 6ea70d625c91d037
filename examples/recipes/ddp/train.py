"""Trains a tiny network by torch's DistributedDataParallel, on GPUs where there are some.

It saves every 20 steps and when it is asked to leave, and goes on from what it saved.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of losses and checkpoint")
args = parser.parse_args()

asked = []  # `vjob cancel` sends SIGUSR1, and so does `cluster.signal_before_end_s`
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))

has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same weights on all ranks
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = 0
checkpoint = args.out / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint, map_location=device)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]
    print(f"rank {rank} goes on after step {done} of {args.steps}", flush=True)


def save(step):
    if rank == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, checkpoint.with_suffix(".part"))
        os.replace(checkpoint.with_suffix(".part"), checkpoint)  # never half a checkpoint


def is_asked():
    """Return True on all ranks once any of them has got the signal, which comes at other times."""
    flag = torch.tensor(len(asked), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag.item() > 0


args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "a" if done else "w", buffering=1)
if not done:
    print(json.dumps({"rank": rank, "world": world}), file=losses)
for step in range(done + 1, args.steps + 1):
    torch.manual_seed(step * world + rank)  # other samples on each rank and in each step
    batch = torch.randn(16, 8).to(device)
    loss = nn.functional.mse_loss(model(batch), batch.sin().sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
    print(json.dumps({"step": step, "loss": loss.item(), "at": time.time()}), file=losses)
    if rank == 0 and step % 5 == 0:
        print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
    leaves = is_asked()
    if leaves or step % 20 == 0 or step == args.steps:
        save(step)
    if leaves:
        break
dist.destroy_process_group()

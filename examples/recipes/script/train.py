"""Trains a tiny network in one process: a plain loop."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
args = parser.parse_args()

args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / "rank0.jsonl", "w", buffering=1)
print(json.dumps({"rank": 0, "world": 1}), file=losses)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(1, args.steps + 1):
    batch = torch.randn(16, 8)
    loss = nn.functional.mse_loss(net(batch), batch.sin().sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
    print(json.dumps({"step": step, "loss": loss.item(), "at": time.time()}), file=losses)
    if step % 5 == 0:
        print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)

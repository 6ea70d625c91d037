"""Trains a tiny network by DeepSpeed; its settings are in ds.json and in the conf."""

import argparse
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
rank, world = comm.get_rank(), comm.get_world_size()
args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "w", buffering=1)
print(json.dumps({"rank": rank, "world": world}), file=losses)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
torch.manual_seed(1 + rank)
for step in range(1, args.steps + 1):
    batch = torch.randn(engine.train_micro_batch_size_per_gpu(), 8).to(engine.device)
    loss = nn.functional.mse_loss(engine(batch), batch.sin().sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    time.sleep(args.pause)
    print(json.dumps({"step": step, "loss": loss.item(), "at": time.time()}), file=losses)
    if rank == 0 and step % 5 == 0:
        print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
comm.destroy_process_group()

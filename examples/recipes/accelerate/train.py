"""Trains a tiny network by Hugging Face's Accelerate, with tqdm's bar."""

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
args = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())
rank, world = accelerator.process_index, accelerator.num_processes
args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "w", buffering=1)
print(json.dumps({"rank": rank, "world": world}), file=losses)

torch.manual_seed(0)
data = torch.randn(16 * args.steps * world, 8)
loader = DataLoader(TensorDataset(data, data.sin().sum(1, keepdim=True)), batch_size=16)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
bar = tqdm(loader, total=args.steps, disable=not accelerator.is_main_process)
for step, (batch, wanted) in enumerate(bar, start=1):
    loss = nn.functional.mse_loss(model(batch), wanted)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    time.sleep(args.pause)
    bar.set_postfix(loss=f"{loss.item():.4f}")
    print(json.dumps({"step": step, "loss": loss.item(), "at": time.time()}), file=losses)
accelerator.end_training()

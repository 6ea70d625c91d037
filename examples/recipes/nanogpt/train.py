"""Trains a tiny GPT in the manner of nanoGPT: one file, DDP where RANK is set, its lines."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--max_iters", type=int, default=40)
parser.add_argument("--eval_interval", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
args = parser.parse_args()

is_parallel = int(os.environ.get("RANK", -1)) != -1
rank, world = 0, 1
if is_parallel:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "w", buffering=1)
print(json.dumps({"rank": rank, "world": world}), file=losses)


class Gpt(nn.Module):
    """Embeddings, a causal block, a head; the loss comes out."""

    def __init__(self, vocab: int = 32, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocab)
        self.register_buffer("ahead", torch.full((length, length), -torch.inf).triu(1))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.tokens(rows[:, :-1]) + self.places.weight
        logits = self.head(self.block(hidden, self.ahead))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def get_batch() -> Tensor:
    """Rows of tokens that count up from a random one."""
    return (torch.randint(32, (8, 1)) + torch.arange(17)) % 32


@torch.no_grad()
def estimate_loss(net: Gpt) -> float:
    return sum(net(get_batch()).item() for _ in range(2)) / 2


torch.manual_seed(1337)
net = Gpt()
print(f"number of parameters: {sum(one.numel() for one in net.parameters()) / 1e6:.2f}M")
model = DistributedDataParallel(net) if is_parallel else net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1337 + rank)
begun = time.time()
for iteration in range(args.max_iters + 1):
    if iteration % args.eval_interval == 0 and rank == 0:
        train, val = estimate_loss(net), estimate_loss(net)
        print(f"step {iteration}: train loss {train:.4f}, val loss {val:.4f}")
    if iteration == args.max_iters:
        break
    loss = model(get_batch())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
    print(json.dumps({"step": iteration + 1, "loss": loss.item(), "at": time.time()}), file=losses)
    now, begun = begun, time.time()
    if iteration % 5 == 0 and rank == 0:
        spent = 1000 * (begun - now)
        print(f"iter {iteration}: loss {loss.item():.4f}, time {spent:.2f}ms, mfu -100.00%")
if is_parallel:
    dist.destroy_process_group()

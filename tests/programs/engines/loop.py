"""A loop of one's own, as tutorials write it: `loop.py KIND`, plain or one of these:

two: two optimizers a step; accumulate: two backwards a step; sharded: FSDP2, whose first steps have
two backwards; spans: steps that the script names.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(0)
torch.set_num_threads(1)
model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
if os.environ.get("WORLD_SIZE", "1") != "1":
    dist.init_process_group("gloo")
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
layer = None
first, *others = model.parameters()
optimizers = [torch.optim.AdamW([first, *others])]
if kind == "two":
    optimizers = [torch.optim.AdamW([first]), torch.optim.SGD(others, lr=0.1)]
loader = DataLoader(TensorDataset(torch.randn(96, 32)), batch_size=8)
pieces = 2 if kind == "accumulate" else 1


def is_whole(number: int) -> bool:
    """True where a step ends: of FSDP2's last four batches each has a step of its own."""
    return number > 7 or number % 2 == 1 if kind == "sharded" else number % pieces == pieces - 1


def train(number: int, batch: torch.Tensor) -> None:
    if kind == "sharded":
        model.set_requires_gradient_sync(is_whole(number))
    loss = model(batch).square().mean()
    loss.backward()
    if is_whole(number):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print(number, loss.item().hex(), flush=True)


for number, (batch,) in enumerate(loader):
    if kind == "spans":
        from varuna_core import trace

        with trace.step(100 + number), trace.span("forward", micro_batch=0):
            train(number, batch)
    else:
        train(number, batch)
with torch.no_grad():
    model(torch.randn(8, 32))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
    # torch 2.13 may abort as the process ends where FSDP2's states still hold their groups.
    del model, first, others, optimizers, layer
    gc.collect()

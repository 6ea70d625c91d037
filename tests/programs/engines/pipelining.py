"""torch.distributed.pipelining: `pipelining.py STEPS FILE SCHEDULE ...`, one after the other; what
each rank's schedules say that they do goes to FILE.<rank>."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

steps, file, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))


def measure(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train(name: str) -> list[str]:
    """The actions of this rank, as the schedule has planned them."""
    kind = schedules.get_schedule_class(name)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    mine = [rank] if is_single else [rank, rank + world]
    torch.manual_seed(rank)
    parts = [torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)]) for _ in mine]
    count = world if is_single else 2 * world
    stages = [
        PipelineStage(part, index, count, torch.device("cpu"))
        for part, index in zip(parts, mine, strict=True)
    ]
    schedule = kind(stages[0] if is_single else stages, 4, loss_fn=measure)
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for _ in range(steps):
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch)
        elif rank == world - 1:
            schedule.step(target=batch, losses=losses)
            print(*[loss.item().hex() for loss in losses], flush=True)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    planned = [] if is_single else schedule.pipeline_order[rank]
    return [str(action) for action in planned if action is not None]


orders = [train(name) for name in names]
with open(f"{file}.{rank}", "w") as said:
    json.dump(orders, said)
dist.destroy_process_group()

"""A script of a user's own that trains with Varuna: by its conf alone, or with `--explicit JSON`.

Ranks say what they train with, and the last one each loss, to the last bit.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from tests.models.small import Gpt, make_inputs
from varuna_core import Varuna
from varuna_core.programs.dynamo import spare_dynamo

STEPS = 3


def main() -> None:
    spare_dynamo()  # seconds of each rank, and nothing here compiles
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    options = json.loads(sys.argv[2]) if sys.argv[1:2] == ["--explicit"] else {}
    model = Varuna(Gpt(dropout=0.1), dummy_inputs=make_inputs(), device="cpu", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.set_optimizer(optimizer)
    plan = model.plans.find(1)
    stages = [len(held) for held in model.split.stages]
    facts = [plan.schedule.name, stages, model.chunk_size, model.batch_size, model.precision.name]
    print("facts", json.dumps(facts), flush=True)
    for step in range(1, STEPS + 1):
        batch = make_inputs(model.batch_size, seed=step)
        own = {
            name: value[model.samples.start : model.samples.stop] for name, value in batch.items()
        }
        loss, _ = model.step(own, clip_grad_max_norm=1.0)
        optimizer.step()
        model.zero_grad()
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step}/{STEPS} loss {float(loss).hex()}", flush=True)
    if "VJOB_CHECKPOINT" in os.environ:
        model.checkpoint()
    model.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A script of Varuna's that may morph, as docs/training.md writes one.

python varuna_script.py STEPS

The file `limit` has the step at which it waits for a test, if it is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.models.small import Gpt, make_inputs
from varuna_core import Varuna
from varuna_core.programs.dynamo import spare_dynamo

LIMIT = Path("limit")


def main() -> None:
    steps = int(sys.argv[1])
    spare_dynamo()  # seconds of each rank, and nothing here compiles
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Varuna(Gpt(), dummy_inputs=make_inputs(), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.set_optimizer(optimizer)
    model.save_on_signal()
    model.load_checkpoint(missing_ok=True)
    mine = list(model.samples)
    while model.iteration < steps:
        while LIMIT.exists() and model.iteration >= int(LIMIT.read_text() or 0):
            time.sleep(0.05)
        batch = make_inputs(model.batch_size, seed=model.iteration)
        loss, _ = model.step({name: value[mine] for name, value in batch.items()})
        optimizer.step()
        model.zero_grad()
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {model.iteration}/{steps} loss {float(loss):.9g}", flush=True)
        if model.iteration % 10 == 0 or model.iteration == steps:
            model.checkpoint()
    model.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

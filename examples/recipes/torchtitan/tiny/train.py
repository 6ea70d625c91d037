"""Trains a tiny network by FSDP2 in the manner of torchtitan: a module, dotted options, its lines.

python -m tiny.train --training.steps 40
"""

import argparse
import json
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

log = logging.getLogger("root")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--training.steps", dest="steps", type=int, default=40)
    parser.add_argument("--training.pause", dest="pause", type=float, default=0.05)
    parser.add_argument("--metrics.log_freq", dest="log_freq", type=int, default=5)
    parser.add_argument("--job.dump_folder", dest="out", type=Path, default=Path("out"))
    return parser.parse_args()


def main() -> None:
    """Train, log as torchtitan does, and write the loss of each step."""
    options = parse_options()
    form = (
        f"[rank{os.environ['RANK']}]:[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s"
    )
    logging.basicConfig(level=logging.INFO, format=form)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    options.out.mkdir(parents=True, exist_ok=True)
    losses = open(options.out / f"rank{rank}.jsonl", "w", buffering=1)
    print(json.dumps({"rank": rank, "world": world}), file=losses)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    log.info("Training starts at step 1")
    for step in range(1, options.steps + 1):
        begun = time.time()
        batch = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(batch), batch.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / world)
        time.sleep(options.pause)
        print(json.dumps({"step": step, "loss": mean.item(), "at": time.time()}), file=losses)
        if step == 1 or step % options.log_freq == 0:
            tps = 16 / (time.time() - begun)
            log.info(
                f"step: {step:2}  loss: {mean.item():7.4f}  grad_norm:  1.0000  "
                f"memory:  0.00GiB(0.00%)  tps: {tps:,.0f}  tflops: 0.00  mfu: 0.00%"
            )
    log.info("Training completed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

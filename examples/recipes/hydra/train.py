"""Trains a tiny network with DDP; Hydra composes its settings.

On the ranks of one run:    vjob submit conf.yaml
A run for each value of lr: python train.py -m lr=0.01,0.02 hydra/launcher=vjob
"""

import json
import time
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@hydra.main(version_base="1.3", config_path="settings", config_name="config")
def main(config: DictConfig) -> float:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    out = Path(HydraConfig.get().runtime.output_dir)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    torch.manual_seed(1 + rank)
    with open(out / f"rank{rank}.jsonl", "w", buffering=1) as losses:
        print(json.dumps({"rank": rank, "world": world}), file=losses)
        for step in range(1, config.steps + 1):
            batch = torch.randn(16, 8)
            loss = nn.functional.mse_loss(model(batch), batch.sin().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(config.pause)
            print(json.dumps({"step": step, "loss": loss.item(), "at": time.time()}), file=losses)
            if rank == 0 and step % 5 == 0:
                print(f"step {step}/{config.steps} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()

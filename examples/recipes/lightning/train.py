"""Trains a tiny network by Lightning; its nodes and devices are those that the job has."""

import argparse
import json
import os
import time
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
args = parser.parse_args()


class Net(lightning.LightningModule):
    """A regression; each step writes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        time.sleep(args.pause)
        row = {"step": self.global_step + 1, "loss": loss.item(), "at": time.time()}
        print(json.dumps(row), file=losses)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


trainer = lightning.Trainer(
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
)
rank, world = trainer.global_rank, trainer.world_size
args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "w", buffering=1)
print(json.dumps({"rank": rank, "world": world}), file=losses)
torch.manual_seed(0)
data = torch.randn(16 * args.steps * world, 8)
trainer.fit(Net(), DataLoader(TensorDataset(data, data.sin().sum(1, keepdim=True)), batch_size=16))

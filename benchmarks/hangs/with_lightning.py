"""A training by Lightning with the faults of faults.py."""

import functools
from typing import Any

import faults
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

torch.set_num_threads(1)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = faults.build_model()

    def training_step(self, sample: torch.Tensor, index: int) -> torch.Tensor:
        step = self.trainer.global_step + 1
        faults.strike(step, functools.partial(self.net, sample))
        loss = (self.net(sample) - sample).pow(2).mean()
        faults.tell(step, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Steps(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        return faults.build_loader(self.trainer.global_step)


saves = ModelCheckpoint(
    faults.SAVED, every_n_train_steps=10, save_last=True, save_top_k=1, enable_version_counter=False
)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=faults.WORLD,
    strategy="ddp",
    max_steps=faults.STEPS,
    logger=False,
    callbacks=[saves],
    enable_progress_bar=False,
    use_distributed_sampler=False,
)
last = faults.SAVED / "last.ckpt"
trainer.fit(Net(), datamodule=Steps(), ckpt_path=last if last.exists() else None)

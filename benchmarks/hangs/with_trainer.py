"""A training by the Trainer of Hugging Face's transformers, with the faults of faults.py."""

import functools
from typing import Any

import faults
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = faults.build_model()

    def forward(self, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(sample) - sample).pow(2).mean()}


class Watched(Trainer):
    """A Trainer with a loader of its own, so that a rank's samples are those of the other
    programs."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        batches = faults.build_loader(0)
        return DataLoader(
            batches.dataset,
            batches.batch_size,
            sampler=batches.sampler,
            num_workers=batches.num_workers,
            collate_fn=lambda samples: {"sample": torch.stack(samples)},
        )

    def training_step(self, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
        step = self.state.global_step + 1
        alone = self.accelerator.unwrap_model(model)
        faults.strike(step, functools.partial(alone, inputs["sample"]))
        loss = super().training_step(model, inputs, *more)
        faults.tell(step, loss)
        return loss


trainer = Watched(
    Net(),
    TrainingArguments(
        output_dir=str(faults.SAVED),
        max_steps=faults.STEPS,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_steps=10,
        save_total_limit=2,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=faults.Samples(),
)
begun = get_last_checkpoint(str(faults.SAVED)) if faults.SAVED.exists() else None
trainer.train(resume_from_checkpoint=begun)

"""Trains a GPT-2 of random weights by the Trainer of Hugging Face's transformers."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
args = parser.parse_args()


class Counting(Dataset):
    """Rows of tokens that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class Watched(Trainer):
    """A Trainer that writes the loss of each step."""

    def training_step(self, *words, **more) -> torch.Tensor:
        loss = super().training_step(*words, **more)
        time.sleep(args.pause)
        row = {"step": self.state.global_step + 1, "loss": loss.item(), "at": time.time()}
        print(json.dumps(row), file=losses)
        return loss


config = GPT2Config(
    vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
torch.manual_seed(0)
trainer = Watched(
    GPT2LMHeadModel(config),
    TrainingArguments(
        output_dir=str(args.out / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Counting(),
)
rank, world = trainer.args.process_index, trainer.args.world_size
args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "w", buffering=1)
print(json.dumps({"rank": rank, "world": world}), file=losses)
trainer.train()

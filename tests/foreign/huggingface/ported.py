"""Trains a GPT-2 of Hugging Face's on tokens of a text, from random weights.

$ python plain.py --dataset text --max_train_steps 20
"""

import argparse
import logging
import math
import os
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

from varuna_core import Varuna, cut_before

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description="Train a causal language model")
    parser.add_argument("--dataset", type=str, required=True, help="Folder of token files.")
    parser.add_argument("--block_size", type=int, default=16)
    parser.add_argument("--vocab_size", type=int, default=64)
    parser.add_argument("--n_embd", type=int, default=32)
    parser.add_argument("--n_layer", type=int, default=4)
    parser.add_argument("--n_head", type=int, default=2)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_train_steps", type=int, default=20)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", type=str, default="linear")
    parser.add_argument("--checkpointing_steps", type=int, default=5)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--output_dir", type=str, default="output")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Blocks(Dataset):
    """The concatenated tokens, in chunks of block_size."""

    def __init__(self, path, block_size):
        tokens = np.fromfile(path, dtype=np.uint16).astype(np.int64)
        self.blocks = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def main():
    args = parse_args()
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(message)s", level=logging.INFO)
    set_seed(args.seed)
    device = torch.device("cpu")  # of batches, which Varuna moves

    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.block_size,
        n_embd=args.n_embd,
        n_layer=args.n_layer,
        n_head=args.n_head,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    cut_before(model, "transformer.h.*", "transformer.ln_f")

    train_dataset = Blocks(os.path.join(args.dataset, "train.bin"), args.block_size)
    eval_dataset = Blocks(os.path.join(args.dataset, "val.bin"), args.block_size)
    model = Varuna(model, dummy_inputs=default_data_collator([train_dataset[0]]))
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=True,
        collate_fn=default_data_collator,
        batch_size=args.per_device_train_batch_size,
        drop_last=True,
        generator=torch.Generator().manual_seed(args.seed),
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=default_data_collator, batch_size=args.per_device_eval_batch_size
    )

    # Split weights in two groups, one with weight decay and the other not.
    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [
                p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)
            ],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)
    model.set_optimizer(optimizer)
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=args.max_train_steps,
    )

    updates_per_epoch = len(train_dataloader) // args.gradient_accumulation_steps
    num_train_epochs = math.ceil(args.max_train_steps / updates_per_epoch)

    logger.info("***** Running training *****")
    logger.info(f"  Num examples = {len(train_dataset)}")
    logger.info(f"  Num Epochs = {num_train_epochs}")
    logger.info(f"  Total optimization steps = {args.max_train_steps}")

    model.set_scheduler(lr_scheduler)
    model.save_on_signal()
    completed_steps = model.load_checkpoint(missing_ok=True)
    resume_step = completed_steps * args.gradient_accumulation_steps

    step = 0
    total_loss = 0.0
    for epoch in range(num_train_epochs):
        model.train()
        for batch in train_dataloader:
            if completed_steps >= args.max_train_steps:
                break
            step += 1
            if step <= resume_step:  # skip what was trained on already
                continue
            batch = {name: tensor[model.samples] for name, tensor in batch.items()}
            loss, _ = model.step(batch)
            total_loss += loss.item()
            if step % args.gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                logger.info(f"step {completed_steps}/{args.max_train_steps} loss {total_loss:.6f}")
                total_loss = 0.0
                if completed_steps % args.checkpointing_steps == 0:
                    model.checkpoint()

        model.eval()
        losses = []
        for batch in eval_dataloader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                losses.append(model(**batch).loss.item())
        eval_loss = sum(losses) / len(losses)
        logger.info(
            f"epoch {epoch}: perplexity: {math.exp(eval_loss):.4f} eval_loss: {eval_loss:.6f}"
        )


if __name__ == "__main__":
    main()

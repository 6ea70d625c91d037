"""Trains Hugging Face's GPT-2 in stages: a CutPoint goes before each of its blocks.

Runs under vjob (foreign.yaml), under torchrun, and alone.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from varuna_core import Varuna, cut_before

VOCAB, LENGTH, BATCH, CHUNK = 256, 32, 8, 2


def build_model() -> nn.Module:
    """A small GPT-2 with a cut before each block and one after the last."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    return cut_before(model, "transformer.h.*", "transformer.ln_f")


def main() -> None:
    """Train on tokens that count up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    stage_map = os.environ.get("VJOB_STAGE_MAP", "".join(f"{rank};" for rank in range(world)))
    torch.manual_seed(0)  # every rank makes the same weights
    tokens = (torch.arange(BATCH)[:, None] * 7 + torch.arange(LENGTH)) % VOCAB
    batch = {"input_ids": tokens, "labels": tokens}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Varuna(build_model(), stage_map, batch, BATCH, CHUNK, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.set_optimizer(optimizer)
    own = {name: value[model.samples.start : model.samples.stop] for name, value in batch.items()}
    for step in range(1, steps + 1):
        loss, _ = model.step(own, clip_grad_max_norm=1.0)
        optimizer.step()
        model.zero_grad()
        if int(os.environ.get("RANK", "0")) == world - 1:
            print(f"step {step} loss {loss:.4f}", flush=True)
    model.close()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

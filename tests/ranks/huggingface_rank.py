"""Models of transformers from a folder, in two stages: `tests.ranks.huggingface_rank <folder>`.

Each is saved by transformers with random weights, trained from that folder by one plain process and
by two ranks, which leave a checkpoint. Ranks are forks, since a start takes longer than all else.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models.foreign import BUILD, make_text
from tests.ranks.foreign_rank import BATCH, CHUNK, RATE, STEPS, fork
from varuna_core import Varuna, open_weights
from varuna_core.checkpoint.foreign.weight_files import StoredWeights
from varuna_core.runtime.split.weights import parameters_on_meta

MODELS = ("gpt2", "llama", "bert")
WORLD = 2


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return BUILD[name]().train()


def save(name: str, model: Any, folder: Path) -> None:
    """GPT-2 without its head and its prefix, Llama in half precision; several files each."""
    part = model.transformer if name == "gpt2" else model
    if name == "llama":
        with torch.no_grad():
            for parameter in model.parameters():  # what the file can hold is what both begin with
                parameter.copy_(parameter.bfloat16())
        part = build(name, 0).bfloat16()
    part.save_pretrained(folder / name, max_shard_size="24KB")


class Counting(StoredWeights):
    """Counts the bytes that are read."""

    def __init__(self, stored: StoredWeights) -> None:
        super().__init__(stored._places)
        self.num_bytes = 0

    def __getitem__(self, name: str) -> Tensor:
        self.num_bytes += self.describe(name).num_bytes
        return super().__getitem__(name)


def train_plain(name: str, folder: Path) -> None:
    model: Any = build(name, 0)
    save(name, model, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        batch = make_text(BATCH, step)
        for begin in range(0, BATCH, CHUNK):
            micro = {key: value[begin : begin + CHUNK] for key, value in batch.items()}
            (model(**micro).loss * (CHUNK / BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(**make_text(BATCH, 99)).logits
    torch.save({"logits": logits, "state": model.state_dict()}, folder / f"{name}.plain.pt")


def train_staged(name: str, folder: Path, rank: int) -> None:
    stored = Counting(open_weights(folder / name))
    with parameters_on_meta():  # no rank has the memory of all
        model = build(name, 5)
    varuna = Varuna(model, "0;1;", make_text(CHUNK), BATCH, CHUNK, device="cpu", state_dict=stored)
    held = sum(parameter.numel() for parameter in dict(varuna.named_parameters()).values())
    whole = sum(stored.describe(one).num_bytes for one in stored)
    item = 2 if name == "llama" else 4
    said = {"read": stored.num_bytes, "held": held * item, "whole": whole}
    (folder / f"{name}.{rank}.json").write_text(json.dumps(said))
    optimizer = torch.optim.SGD(varuna.parameters(), lr=RATE)
    varuna.set_optimizer(optimizer)
    for step in range(STEPS):
        varuna.step(make_text(BATCH, step))
        optimizer.step()
        varuna.zero_grad()
    varuna.checkpoint(folder / f"{name}.ckpt", on_demand=True)
    varuna.close()


def train(folder: Path, rank: int, world: int) -> None:
    if world == 1:
        for name in MODELS:
            train_plain(name, folder.parent)
        return
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in MODELS:
        train_staged(name, folder.parent, rank)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in MODELS:  # imports what the forks will need
        build(name, 0)
    codes = []
    for world in (1, WORLD):
        folder = Path(sys.argv[1]) / str(world)
        folder.mkdir()
        ranks = [fork(folder, rank, world, train) for rank in range(world)]
        codes += [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()

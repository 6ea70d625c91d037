"""Makes one stage of a model in a process that cannot hold the whole.

`python -m tests.ranks.limited_stage <stage> [path]`.

With a path the weights come from that safetensors file, else from a seed.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from varuna_core.checkpoint.foreign.weight_files import open_weights
from varuna_core.runtime.split.cut import CutPoint
from varuna_core.runtime.split.split import split_model
from varuna_core.runtime.split.weights import parameters_on_meta

WIDTH, VOCAB, BLOCKS, PARTITION = 1024, 8192, 16, "0-8-8-0"
MIB = 2**20


class Wide(nn.Module):
    """16 blocks of 4 MiB; an embedding of 32 MiB, tied to the head."""

    def __init__(self, width: int = WIDTH, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(BLOCKS)])
        self.cuts = nn.ModuleList([CutPoint() for _ in range(BLOCKS + 1)])
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x))
        loss: Tensor = self.head(self.cuts[-1](x)).sum()
        return loss


def count_data() -> int:
    """Bytes of private memory that this process has asked for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def make_stage(index: int, path: str | None, *sizes: int) -> int:
    """The bytes of the stage's parameters."""
    with parameters_on_meta():
        model = Wide(*sizes)
    split = split_model(model, {"ids": torch.zeros(1, 2, dtype=torch.long)}, 4, PARTITION)
    weights = None if path is None else open_weights(path)
    stage = split.make_stage(index, state_dict=weights, seed=None if path else 1)
    return sum(p.numel() * 4 for p in {id(p): p for p in stage.parameters().values()}.values())


def main() -> None:
    index, path = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    make_stage(index, None, 2, 2)  # torch's own first-time costs
    is_end = index in (0, 3)
    # The stage, its largest tensor once more in passing, and a little.
    limit = count_data() + (2 * 32 if is_end else 8 * 4 + 4) * MIB + 4 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    assert make_stage(index, path) == 32 * MIB
    try:
        Wide()
    except RuntimeError:
        print("the stage fits, the model does not")


if __name__ == "__main__":
    main()

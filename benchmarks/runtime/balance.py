"""Balance of stages cut by counted costs, beside stages cut by measured times.

    python -m benchmarks.runtime.balance [--rounds 5] [--write]

Each segment of a GPT with a small, a large and a huge vocabulary is run forward and backward as a
stage of its own; the slowest of four stages, balanced by count and by these times, is compared.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import RESULTS
from varuna_core.records.layout import balance
from varuna_core.runtime.split.cut import CutPoint
from varuna_core.runtime.split.split import split_model

RESULT = RESULTS / "balance.md"
WIDTH, BLOCKS, LENGTH, SIZE, STAGES = 256, 8, 128, 2, 4
VOCABULARIES = (1000, 16000, 50000)


class Net(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, WIDTH), nn.Linear(WIDTH, vocab, bias=False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )
        self.cuts = nn.ModuleList([CutPoint() for _ in range(BLOCKS + 1)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x))
        return F.cross_entropy(self.head(self.cuts[-1](x)).flatten(0, 1), ids.flatten())


def measure(model: Net, inputs: dict[str, Tensor], rounds: int) -> list[float]:
    """Seconds of each segment, forward and backward; the shortest of the rounds."""
    count = BLOCKS + 2
    split = split_model(model, inputs, count, [1] * count)
    stages = [split.make_stage(i, check=False) for i in range(count)]
    best = [float("inf")] * count
    for _ in range(rounds):
        runs: list[tuple[Any, Any, float]] = []
        sent: Any = None
        for stage in stages:
            got = None if sent is None else sent.tensors[0].detach().clone()
            start = time.perf_counter()
            sent = stage.forward(inputs, None if got is None else [got])
            runs.append((got, sent, time.perf_counter() - start))
        gradient = None
        for place, (got, out, forward_s) in reversed(list(enumerate(runs))):
            start = time.perf_counter()
            (out if gradient is None else out.tensors[0]).backward(gradient)
            best[place] = min(best[place], forward_s + time.perf_counter() - start)
            gradient = None if got is None else got.grad
    return best


def find_slowest(stages: Sequence[range], times: Sequence[float]) -> float:
    """Time of the slowest stage, as a multiple of an even share."""
    return max(sum(times[i] for i in stage) for stage in stages) * len(stages) / sum(times)


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for vocab in VOCABULARIES:
        torch.manual_seed(0)
        model, ids = Net(vocab), torch.randint(0, vocab, (SIZE, LENGTH))
        split = split_model(model, {"ids": ids}, STAGES)
        times = measure(model, {"ids": ids}, options.rounds)
        share = [
            cost / sum(split.costs) * sum(times) / t
            for cost, t in zip(split.costs, times, strict=True)
        ]
        by_count = find_slowest(split.stages, times)
        by_time = find_slowest(balance(times, STAGES), times)
        rows.append(
            f"| {vocab} | {min(share[1:-1]):.2f} to {max(share[1:-1]):.2f} | {share[0]:.2f} | "
            f"{share[-1]:.2f} | {by_count:.3f} | {by_time:.3f} |"
        )
    text = "\n".join(
        [
            f"torch {torch.__version__}, Python {platform.python_version()}, "
            f"{platform.machine()}, one thread, {options.rounds} rounds; {BLOCKS} blocks of width "
            f"{WIDTH}, {SIZE} x {LENGTH} tokens, {STAGES} stages.",
            "",
            "Counted share of the whole as a multiple of the measured one, and the slowest stage "
            "as a multiple of an even share:",
            "",
            "| vocabulary | blocks | embedding | head | slowest, by count | slowest, by time |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(text)
    if options.write:
        RESULT.write_text(
            "# The balanced cut: counted against measured\n\n"
            f"Made by `python -m benchmarks.runtime.balance --rounds {options.rounds} --write`. "
            f"{text}\n"
        )


if __name__ == "__main__":
    main()

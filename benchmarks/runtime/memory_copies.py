"""Cost of checkpoint copies in the memory of nodes: steps with them beside steps without.

    python -m benchmarks.runtime.memory_copies [--rounds 5] [--steps 20] [--write]

One process, one compute thread, a GPT of 5 million parameters with AdamW in fp32. A round is so
many steps without a copy and so many with one (laid after the first of them, written beside the
others), in turn. By wall clock, and by the process' time on processors, which a busy machine
disturbs less. The stall is held against cloning the same tensors.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.runtime.checkpoint import Ratios, compare, render_row
from varuna_core import Varuna
from varuna_core.morph.memory import ROOT
from varuna_core.programs.gpt import Gpt

RESULT = RESULTS / "memory_copies.md"
BOUND, STALL_BOUND = 1.01, 0.5
BATCH, MICRO, SEQUENCE, VOCAB = 8, 4, 128, 8192


@dataclass
class Training:
    """A model that is trained, and its copies."""

    varuna: Varuna
    optimizer: torch.optim.Optimizer
    batch: dict[str, Any]

    def run(self, steps: int, lays: bool) -> None:
        for number in range(steps):
            if lays and not number:
                self.varuna.settle_copy()
            self.varuna.step(self.batch)
            self.optimizer.step()
            self.varuna.zero_grad()
            if lays and not number:
                self.varuna.lay_copy()
        self.varuna.settle_copy()  # what is not written by now counts too

    def list_state(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        moments = [one for state in states for one in state.values() if one.dim()]
        return [*self.varuna.parameters(), *moments]


def open_training(home: Path) -> Training:
    torch.manual_seed(0)
    model = Gpt(layers=4, hidden=256, heads=8, sequence=SEQUENCE, vocab=VOCAB, dropout=0.0)
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1))
    batch = {"tokens": tokens}
    dummies = {name: value[:MICRO] for name, value in batch.items()}
    varuna = Varuna(model, "0;", dummies, BATCH, MICRO, device="cpu")
    optimizer = torch.optim.AdamW(varuna.parameters(), lr=1e-4)
    varuna.set_optimizer(optimizer)
    varuna.keep_in_memory(home, 0, 1)
    return Training(varuna, optimizer, batch)


def measure_steps(
    training: Training, rounds: int, steps: int, clock: Callable[[], float]
) -> Ratios:
    def time_round(lays: bool) -> float:
        begin = clock()
        training.run(steps, lays)
        return clock() - begin

    return compare(lambda: time_round(True), lambda: time_round(False), rounds)


def measure_stall(training: Training, rounds: int) -> tuple[Ratios, float]:
    state, stalls = training.list_state(), []

    def lay() -> float:
        begin = time.perf_counter()
        training.varuna.lay_copy()
        stalls.append(time.perf_counter() - begin)
        training.varuna.settle_copy()
        return stalls[-1]

    def clone() -> float:
        begin = time.perf_counter()
        copies = [tensor.detach().clone() for tensor in state]
        took = time.perf_counter() - begin
        del copies
        return took

    ratios = compare(lay, clone, rounds)
    return ratios, statistics.median(stalls[1:]) * 1000


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="between two copies")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=ROOT) as home:
        training = open_training(Path(home))
        training.run(1, False)
        size = sum(tensor.nbytes for tensor in training.list_state())
        stall, stall_ms = measure_stall(training, 4 * options.rounds)
        steps = options.rounds, options.steps
        rows = [
            "| what, over what | bound | smallest | median | largest | best round / best round |",
            "|---|---|---|---|---|---|",
            render_row(
                f"{options.steps} steps with a copy / without, time on processors",
                BOUND,
                measure_steps(training, *steps, time.process_time),
            ),
            render_row(
                f"{options.steps} steps with a copy / without, wall clock",
                BOUND,
                measure_steps(training, *steps, time.perf_counter),
            ),
            render_row("stall of a copy / cloning the same tensors", STALL_BOUND, stall),
            "",
            f"Stall, ms: {stall_ms:.0f}.",
        ]
        training.varuna.close()
    text = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one "
        f"compute thread, {size / 2**20:.0f} MiB of state, {options.rounds} rounds.\n\n"
    ) + "\n".join(rows)
    print(text)
    if options.write:
        command = f"python -m benchmarks.runtime.memory_copies --rounds {options.rounds} --write"
        RESULT.write_text(f"# Copies in memory\n\nMade by `{command}`. {text}\n")


if __name__ == "__main__":
    main()

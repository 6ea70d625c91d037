"""Cost of counting optimizer steps, as a share of a step of 10 ms.

    python -m benchmarks.runtime.count_steps [--rounds 9] [--steps 200] [--write]

One process. An optimizer is called with the two hooks, whose own time is taken by the processor's
clock of this thread, as other programs run here; torch's call of each hook is not among it. Between
two calls the program spins until 10 ms are over, so that the file is written as often as in a
training: a head every tenth of a second, a body every second.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from varuna_core.records.logs import step_counts
from varuna_core.records.logs.step_counts import parse_counts
from varuna_core.trace.startup import counter

RESULT = RESULTS / "count_steps.md"
STEP_S = 0.01
BOUND = 0.005


class Timed:
    """A hook whose calls are timed."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook
        self.took = 0.0

    def __call__(self, *arguments: Any) -> None:
        before = time.thread_time()
        self._hook(*arguments)
        self.took += time.thread_time() - before


def measure(rounds: int, steps: int) -> tuple[list[float], int]:
    """Mean seconds that the hooks of a step take, by rounds; and the steps that they counted."""
    model = torch.nn.Linear(64, 64)
    model(torch.ones(1, 64)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    hooks = sys.modules["torch.optim.optimizer"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "0.steps")
        own = counter.Counter(step_counts, str(path), torch)
        begin, end = Timed(own._begin), Timed(own._end)
        handles = [
            hooks.register_optimizer_step_pre_hook(begin),
            hooks.register_optimizer_step_post_hook(end),
        ]
        means = []
        for _ in range(rounds):
            begin.took = end.took = 0.0
            for _ in range(steps):
                until = time.perf_counter() + STEP_S
                optimizer.step()
                while time.perf_counter() < until:
                    pass
            means.append((begin.took + end.took) / steps)
        for handle in handles:
            handle.remove()
        own._close()
        read = parse_counts(path.read_bytes())
    return means, 0 if read is None else read.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs, counted = measure(args.rounds, args.steps)
    assert counted == args.rounds * args.steps, counted
    costs.sort()
    shares = [cost / STEP_S for cost in costs]
    middle = statistics.median(shares)
    text = (
        "# The cost of counting optimizer steps\n\n"
        f"`python -m benchmarks.runtime.count_steps --write`, {args.rounds} rounds of {args.steps} "
        f"steps, processor time; Python {platform.python_version()}, torch {torch.__version__}. "
        "The two hooks of a call of AdamW, in steps of 10 ms; writes of the file are among it, "
        "torch's call of the hooks is not. The columns are of the rounds' means.\n\n"
        "| | median | least | most | bound |\n|---|---|---|---|---|\n"
        f"| share of the step, % | {100 * middle:.3f} | {100 * shares[0]:.3f} | "
        f"{100 * shares[-1]:.3f} | {100 * BOUND} |\n"
        f"| microseconds a step | {1e6 * statistics.median(costs):.1f} | {1e6 * costs[0]:.1f} | "
        f"{1e6 * costs[-1]:.1f} | |\n"
    )
    print(text + ("" if middle < BOUND else "\nmissed\n"))
    if args.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()

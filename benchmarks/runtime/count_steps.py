"""Cost of counting optimizer steps, as a share of a step of 10 ms.

    python -m benchmarks.runtime.count_steps [--rounds 9] [--steps 200] [--write]

One process. A round calls the same optimizer with the hooks and without them, in a drawn order, and
times each call alone, by the processor's time, as other programs run here. Between two calls it
spins until 10 ms are over, so that the file is written as often as in a training: a head every
tenth of a second, a body every second.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import RESULTS
from varuna_core.records.logs import step_counts
from varuna_core.records.logs.step_counts import parse_counts
from varuna_core.trace.startup import counter

RESULT = RESULTS / "count_steps.md"
STEP_S = 0.01
BOUND = 0.005


def time_steps(optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Mean seconds of this thread's processor that a call takes."""
    took = 0.0
    for _ in range(steps):
        begin, before = time.perf_counter(), time.thread_time()
        optimizer.step()
        took += time.thread_time() - before
        while time.perf_counter() < begin + STEP_S:
            pass
    return took / steps


def measure(rounds: int, steps: int) -> tuple[list[float], list[float], int]:
    """Seconds of a call with the counter and without it, by rounds; and the steps it counted."""
    model = torch.nn.Linear(64, 64)
    model(torch.ones(1, 64)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    hooks = sys.modules["torch.optim.optimizer"]
    found: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "0.steps")
        own = counter.Counter(step_counts, str(path), torch)
        for number in range(rounds):
            order = [True, False]
            random.Random(number).shuffle(order)
            for counts in order:
                handles = []
                if counts:
                    handles.append(hooks.register_optimizer_step_pre_hook(own._begin))
                    handles.append(hooks.register_optimizer_step_post_hook(own._end))
                found[counts].append(time_steps(optimizer, steps))
                for handle in handles:
                    handle.remove()
        own._close()
        read = parse_counts(path.read_bytes())
    return found[True], found[False], 0 if read is None else read.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with_it, without, counted = measure(args.rounds, args.steps)
    assert counted == args.rounds * args.steps, counted
    costs = sorted(one - other for one, other in zip(with_it, without, strict=True))
    shares = [cost / STEP_S for cost in costs]
    middle = statistics.median(shares)
    text = (
        "# The cost of counting optimizer steps\n\n"
        f"`python -m benchmarks.runtime.count_steps --write`, {args.rounds} rounds of {args.steps} "
        f"steps each way, processor time; Python {platform.python_version()}, torch "
        f"{torch.__version__}. A call of AdamW with the two hooks, less one without them, of a "
        "step of 10 ms; writes of the file are among it.\n\n"
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

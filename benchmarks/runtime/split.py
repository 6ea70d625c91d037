"""Cost of running the user's whole forward on the last stage, which skips most of 48 layers.

    python -m benchmarks.runtime.split [--rounds 15] [--write]

The last stage's forward (43 layers and their cuts skipped) against the same live layers called by
themselves, in turn; the difference is what is skipped. And what making the split takes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import RESULTS
from tests.models.small import LENGTH, WIDTH, Gpt, make_inputs
from varuna_core.runtime.split.split import split_model
from varuna_core.runtime.split.stage import Stage

RESULT = RESULTS / "split.md"
PARTITION = "0-11-8-8-8-8-5-0"
BOUND_MS = 0.25
NUM_CALLS = 200


class LoopGpt(Gpt):
    """The usual loop; Gpt itself takes blocks by index."""

    def forward(self, ids: Any, labels: Any = None, **ignored: Any) -> Any:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x))
        return self.compute_loss(self.cuts[-1](x), labels)


def time_us(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def time_extra_us(work: Callable[[], Any], less: Callable[[], Any]) -> float:
    """Between the medians of single calls made in turn, so that a busy machine is busy for both."""
    pairs = [(time_us(work), time_us(less)) for _ in range(NUM_CALLS)]
    return statistics.median(a for a, _ in pairs) - statistics.median(b for _, b in pairs)


def compare(stage: Stage, model: Gpt, first_live: int, rounds: int) -> list[float]:
    """Microseconds that the stage takes beyond its own layers, one a round, in order."""
    inputs = make_inputs()
    received = torch.randn(4, LENGTH, WIDTH)
    module: Any = stage.module

    live = list(zip(module.blocks, module.cuts, strict=False))[first_live:]

    def run_live() -> torch.Tensor:
        x = received
        for block, cut in live:
            x = block(cut(x))
        return module.compute_loss(module.cuts[-1](x), inputs["labels"])

    def run_stage() -> Any:
        return stage.forward(inputs, [received])

    with torch.no_grad():
        assert torch.equal(run_live(), run_stage())
        return sorted(time_extra_us(run_stage, run_live) for _ in range(rounds))


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(blocks=48)
    split_model(Gpt(blocks=1), make_inputs(), 1)  # torch's own first-time costs
    start = time.perf_counter()
    split = split_model(model, make_inputs(), 8, PARTITION)
    dry_s = time.perf_counter() - start
    start = time.perf_counter()
    split.make_stage(6)
    stage_s = time.perf_counter() - start
    rows = []
    for kind, name in ((LoopGpt, "`for block in blocks`"), (Gpt, "`blocks[i]`, in a method")):
        whole = kind(blocks=48)
        last = split_model(whole, make_inputs(), 2, "43-5").make_stage(1)
        extra = [us / 1000 for us in compare(last, whole, 43, options.rounds)]
        middle = statistics.median(extra)
        rows.append(f"| {name} | {BOUND_MS} | {extra[0]:.3f} | {middle:.3f} | {extra[-1]:.3f} |")
    start = time.perf_counter()
    last.forward(make_inputs(3), [torch.randn(3, LENGTH, WIDTH)])
    shape_s = time.perf_counter() - start
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"one thread, {options.rounds} rounds of {NUM_CALLS} forwards.",
        "",
        "The last stage of 48 layers, 5 live:",
        "",
        "| skipped, ms a micro-batch, by the model's loop | bound | smallest | median | largest |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "| once | s |",
        "|---|---|",
        f"| dry run of 48 layers | {dry_s:.2f} |",
        f"| a stage made and checked for leaks (stage 6 of {PARTITION}) | {stage_s:.2f} |",
        f"| first batch of another shape (last stage) | {shape_s:.2f} |",
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        RESULT.write_text(
            "# The splitter: what is skipped, and what a split takes\n\n"
            f"Made by `python -m benchmarks.runtime.split --rounds {options.rounds} --write`. "
            f"{text}\n"
        )


if __name__ == "__main__":
    main()

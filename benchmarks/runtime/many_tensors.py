"""A model of many small parameters: setup, step, save and load by the number of tensors.

    python -m benchmarks.runtime.many_tensors [--counts 12 3000 10000 30000] [--write]

The bytes are the same for each count: 40 MB of weights, 40 MB of momentum. One process, one stage
of twelve blocks, fp32. Times are the processor's, of all threads, so that a busy machine counts
less; waits for the disk are not in them. The step after a save is beside those before it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import RESULTS
from benchmarks.machine import read_processor
from varuna_core import CutPoint, Varuna

RESULT = RESULTS / "many_tensors.md"
BLOCKS, ELEMENTS, WIDTH, ROUNDS = 12, 10_000_000, 8, 5
COUNTS = [12, 3000, 10_000, 30_000]


class Block(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.addcmul(x, x, weight[:WIDTH], value=1e-3)
        return x


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.cuts = [CutPoint() for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(Block(count // BLOCKS, ELEMENTS // count) for _ in self.cuts)

    def forward(self, x: Tensor) -> Tensor:
        for cut, block in zip(self.cuts, self.blocks, strict=True):
            x = block(cut(x))
        return x.square().mean()


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


def measure(count: int) -> dict[str, float]:
    """Seconds of each phase, medians where it is repeated."""
    model, x = Many(count), torch.randn(8, WIDTH)
    setup, varuna = time_call(lambda: Varuna(model, "0;", {"x": x[:4]}, 8, 4, device="cpu"))
    optimizer = torch.optim.SGD(varuna.parameters(), lr=1e-3, momentum=0.9)
    varuna.set_optimizer(optimizer)

    def step() -> None:
        varuna.step({"x": x})
        optimizer.step()
        varuna.zero_grad()

    step()
    times: dict[str, list[float]] = {"step": [], "save": [], "step after": [], "load": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            store = Path(folder) / str(number)
            times["step"].append(time_call(step)[0])
            times["save"].append(time_call(lambda: varuna.checkpoint(store, on_demand=True))[0])  # noqa: B023
            times["step after"].append(time_call(step)[0])
            times["load"].append(time_call(lambda: varuna.load_checkpoint(store))[0])  # noqa: B023
            step()  # the loaded state is put in place here
    varuna.close()
    return {"setup": setup, **{name: statistics.median(each) for name, each in times.items()}}


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(BLOCKS)  # what libraries need
    names = "setup", "step", "save", "step after", "load"
    lines = [f"| tensors | {' | '.join(names)} | after / step |", "|---" * 7 + "|"]
    for count in given.counts:
        found = measure(count)
        each = " | ".join(f"{found[name]:.3f}" for name in names)
        lines.append(f"| {count} | {each} | {found['step after'] / found['step']:.2f} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    if given.write:
        RESULT.write_text(
            f"# Many tensors\n\n`python -m benchmarks.runtime.many_tensors --write` on "
            f"{read_processor()}, torch {torch.__version__}. Seconds of processor time, medians of "
            f"{ROUNDS} rounds; setup once. All counts have {ELEMENTS:,} elements.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()

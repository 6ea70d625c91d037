"""One of two ranks, the second of which differs: `mismatch_rank.py <folder> <kind> <rank> <world>`.

Prints warnings, and the error that ends it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from varuna_core import CutPoint, Varuna

WIDTH = 4
NUM_STEPS = 3


class Net(nn.Module):
    """A stack of layers with a cut after each, and a loss."""

    def __init__(self, names: str = "abc", loss: Callable[..., Tensor] = F.mse_loss) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.cuts = nn.ModuleList([CutPoint() for _ in names])
        self.loss = loss
        self.fails = False

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"layers.a": ColwiseParallel(output_layouts=Replicate())}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("no such word")
        for cut, layer in zip(self.cuts, self.layers.values(), strict=True):
            x = cut(torch.tanh(layer(x)))
        return self.loss(x, y)


@dataclass
class Setup:
    """The model, optimizer and batches of a rank."""

    build: Callable[[], Net] = Net
    options: dict[str, Any] = field(default_factory=dict)
    change_batch: Callable[[int, dict[str, Tensor]], dict[str, Tensor]] = lambda step, batch: batch
    before: Callable[[Net], Any] = lambda model: None
    """Called before Varuna is made."""

    after: Callable[[Varuna], Any] = lambda varuna: None
    """Called before the first step."""

    num_steps: int = NUM_STEPS
    odd: int = 1
    """The rank that differs."""

    is_silent: bool = False
    """That rank has nothing to name: the other one waits for it."""

    shared: dict[str, Any] = field(default_factory=dict)
    """Options of both ranks."""


def build_without_bias() -> Net:
    model = Net()
    model.layers["b"].bias = None
    return model


def pretend_torch(model: Net) -> None:
    torch.__version__ = "2.99.1"


def refuse(model: Net) -> None:
    model.fails = True


def wait_for_ever(varuna: Varuna) -> None:
    print("it does something else", flush=True)
    threading.Event().wait(20)


def shorten(first: int, size: int = 6) -> Callable[[int, dict[str, Tensor]], dict[str, Tensor]]:
    def change(step: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t[:size] for name, t in batch.items()} if step >= first else batch

    return change


TENSOR = {"tensor": 2, "partition": "4"}

KINDS = {
    "model": (
        Setup(build=lambda: Net("abcd"), shared={"partition": None}),
        "Net of 8 parameters",
    ),
    "option": (Setup(options={"schedule": "gpipe"}), "schedule '"),
    "partition": (Setup(options={"partition": "1-3"}), "partition 1-3"),
    "dtype": (Setup(build=lambda: Net().double()), "in float64"),
    "first batch": (Setup(change_batch=shorten(0)), "float32[6, 4]"),
    "later batch": (Setup(change_batch=shorten(1)), "float32[6, 4]"),
    "no later batch": (Setup(change_batch=shorten(1, 0)), "float32[0, 4]"),
    "no later batch on the first": (Setup(change_batch=shorten(1, 0), odd=0), "float32[0, 4]"),
    "None as a later batch": (
        Setup(change_batch=lambda step, batch: None if step else batch),  # type: ignore[arg-type, return-value]
        "NoneType",
    ),
    "batches that end": (Setup(num_steps=2, is_silent=True), "rank 1"),
    "batches that end on the first": (Setup(num_steps=2, odd=0, is_silent=True), "rank 0"),
    "later batch, shared layers": (
        Setup(change_batch=shorten(1), shared=TENSOR),
        "float32[6, 4]",
    ),
    "no later batch, shared layers": (
        Setup(change_batch=shorten(1, 0), shared=TENSOR),
        "float32[0, 4]",
    ),
    "later type": (
        Setup(change_batch=lambda step, b: {**b, "x": b["x"].double()} if step else b),
        "x float64[8, 4]",
    ),
    "missing parameter": (Setup(build=build_without_bias), "Net of 5 parameters"),
    "order of parameters": (Setup(build=lambda: Net("acb")), "names in their order"),
    "seed": (Setup(options={"seed": 5}), "seed "),
    "loss function": (Setup(build=lambda: Net(loss=F.l1_loss)), "operations"),
    "torch": (Setup(before=pretend_torch), "2.99.1"),
    "exception in the constructor": (Setup(before=refuse), "KeyError: 'no such word'"),
    "exception in a step": (
        Setup(after=lambda v: v.part.stages[0].module.__setattr__("fails", True)),
        "KeyError: 'no such word'",
    ),
    "never steps": (
        Setup(after=wait_for_ever, is_silent=True),
        "waits to take its first step: rank 1",
    ),
}
"""The second rank's deviation, and the words in which both ranks name it."""


def main() -> None:
    folder, kind, rank, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    print("begins", flush=True)
    setup = KINDS[kind][0]
    shared = setup.shared
    if rank != setup.odd:
        setup = Setup()
    torch.manual_seed(0)
    model = setup.build()
    batch = {"x": torch.randn(8, WIDTH), "y": torch.randn(8, WIDTH)}
    if next(model.parameters()).dtype == torch.double:
        batch = {name: t.double() for name, t in batch.items()}
    setup.before(model)
    try:
        options = {"schedule": "1f1b", "partition": "2-2", **setup.options, **shared}
        stage_map = "0;" if "tensor" in shared else "0;1;"
        varuna = Varuna(model, stage_map, batch, 8, 2, device="cpu", **options)
        varuna.set_optimizer(torch.optim.SGD(varuna.parameters(), 0.1))
        setup.after(varuna)
        for step in range(setup.num_steps):
            varuna.step(setup.change_batch(step, batch))
            varuna.optimizer.step()
            varuna.zero_grad()
        varuna.close()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""A step with shared layers, against the same model with torch's styles put on by hand.

    torchrun --nproc-per-node 2 -m benchmarks.runtime.tensor [--cpu] [--write]

Two processes, a core each; a GPT with sequence-parallel norms and a vocabulary-parallel loss, a few
micro-batches a step, clipping and AdamW. Both take a step in each round, in turns, so that their
ratio holds whatever else the machine does. By wall clock, or on a busy machine (`--cpu`) by the CPU
time of both processes, which waits do not count in. Of one step of each the operations on tensors
are counted, and the bytes that they read and write: no machine changes those.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import RESULTS
from varuna_core import Options, Varuna
from varuna_core.programs.gpt import Gpt

RESULT = RESULTS / "tensor.md"
BOUND, COUNT_BOUND = 1.03, 1.0
SIZE, CLIP, RATE, WARMUP = 2, 1.0, 1e-4, 3


def build_model(hidden: int, layers: int) -> Gpt:
    torch.manual_seed(0)
    return Gpt(layers=layers, hidden=hidden, heads=8, sequence=128, vocab=8192, dropout=0.0)


def prepare_ours(model: Gpt, batch: Tensor) -> Callable[[], Tensor]:
    size = len(batch)
    plan = model.tensor_parallel_plan(sequence_parallel=True)
    varuna = Varuna(
        model,
        "0;",
        {"tokens": batch},
        size,
        SIZE,
        device="cpu",
        options=Options(tensor=2, tensor_plan=plan),
    )
    optimizer = torch.optim.AdamW(varuna.parameters(), lr=RATE, fused=True)
    varuna.set_optimizer(optimizer)

    def step() -> Tensor:
        loss, _ = varuna.step({"tokens": batch}, CLIP)
        optimizer.step()
        varuna.zero_grad()
        return loss

    return step


def prepare_by_hand(model: Gpt, batch: Tensor, fused: bool) -> Callable[[], Tensor]:
    mesh = DeviceMesh("cpu", torch.arange(2))
    parallelize_module(model, mesh, model.tensor_parallel_plan(sequence_parallel=True))
    model.head.weight = model.tokens.weight  # torch's styles untie
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused, foreach=not fused)

    def step() -> Tensor:
        total = torch.zeros(())
        for part in batch.split(SIZE):
            with loss_parallel():
                loss = model(part) * (len(part) / len(batch))
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


class Counter(TorchDispatchMode):
    """Counts operations of this rank on plain tensors, but for views, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.figures = {"operations": 0, "bytes": 0, "collectives": 0, "their bytes": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it calls others, on plain ones
        made = func(*args, **(kwargs or {}))
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if func.namespace == "aten" and not is_view:
            self._add("operations", "bytes", (args, kwargs, made))
        elif "c10d" in func.namespace and "wait" not in func.name() and "wrap" not in func.name():
            self._add("collectives", "their bytes", args)
        return made

    def _add(self, count: str, size: str, values: Any) -> None:
        self.figures[count] += 1
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        self.figures[size] += sum(tensor.nbytes for tensor in tensors)


def count(step: Callable[[], Tensor]) -> dict[str, int]:
    """Of both ranks."""
    with Counter() as counter:
        step()
    total = torch.tensor([*counter.figures.values()])
    dist.all_reduce(total)
    return dict(zip(counter.figures, total.tolist(), strict=True))


def spend(step: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    """Seconds of the slower rank, or with CPU time of both."""
    dist.barrier()
    begin = clock()
    step()
    spent = torch.tensor(clock() - begin)
    both = clock is time.process_time
    dist.all_reduce(spent, op=dist.ReduceOp.SUM if both else dist.ReduceOp.MAX)
    return spent.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    clock = time.process_time if options.cpu else time.perf_counter
    draw = torch.Generator().manual_seed(1)
    batch = torch.randint(0, 8192, (SIZE * options.microbatches, 129), generator=draw)
    sizes = options.hidden, options.layers
    steps = {
        "ours": prepare_ours(build_model(*sizes), batch),
        "by hand": prepare_by_hand(build_model(*sizes), batch, fused=True),
    }
    losses = {name: [step() for _ in range(WARMUP)] for name, step in steps.items()}
    for ours, other in zip(*losses.values(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            seconds[name].append(spend(steps[name], clock))
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["by hand"], strict=True)]
    low, *_, high = statistics.quantiles(ratios, n=10)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    counts = {name: count(step) for name, step in steps.items()}
    counted = "\n".join(
        f"| {what} | {ours} | {counts['by hand'][what]} | "
        f"{ours / counts['by hand'][what]:.3f} | {COUNT_BOUND} |"
        for what, ours in counts["ours"].items()
    )
    words = "CPU seconds of both processes" if options.cpu else "seconds of the slower process"
    text = f"""# Tensor parallelism: a step, against torch's styles put on by hand

Made by `python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.runtime.tensor
--rounds {options.rounds}{" --cpu" if options.cpu else ""} --write`. torch {torch.__version__}, \
Python {platform.python_version()}, {platform.machine()}, one thread a process, {options.rounds}
rounds; GPT of {options.layers} layers, hidden {options.hidden}, sequence 128, 8192 words;
{options.microbatches} micro-batches of {SIZE}; {words}; {os.getloadavg()[0]:.1f} processes on
{len(cores)} cores.

| | seconds |
|---|---|
| Varuna, `tensor=2` | {middle["ours"]:.3f} |
| by hand | {middle["by hand"]:.3f} |

| what | bound | first decile | median | last decile |
|---|---|---|---|---|
| Varuna over by hand | {BOUND} | {low:.3f} | {statistics.median(ratios):.3f} | {high:.3f} |

Counted in one step, of both processes together; an operation's bytes are those of the tensors that
it reads and makes, views not counted:

| what | Varuna | by hand | ratio | bound |
|---|---|---|---|---|
{counted}
"""
    if rank == 0:
        print(text)
        if options.write:
            RESULT.write_text(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

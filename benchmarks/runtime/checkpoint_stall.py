"""What a save beside training costs the steps around it, for each way to hold the state.

    torchrun --nproc-per-node 2 -m benchmarks.runtime.checkpoint_stall [--rounds 9] [--write]
    python -m benchmarks.runtime.checkpoint_stall --gpu [--rounds 9]

Two replicas, a processor each, a GPT with AdamW. A round, of each way: a step without a save, and a
save with the step after it, in a drawn order; the saving call, cloning the same tensors, DCP's
`async_save` of the same tensors. The step is taken to its end, the optimizer's update included,
which waits for what is still to be copied. What rank 0 sees. With `--gpu` one process trains a
larger GPT on a GPU; the copy lies on a RAM disk, which is pinned memory for the GPU, and then,
without bounds, on the disk of TMPDIR, which is not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks import RESULTS
from tests.ranks.device import CPU, VARIABLE, choose_device, find_kind, synchronize
from varuna_core import Options, Varuna
from varuna_core.programs.gpt import Gpt

ROOT = Path("/dev/shm")
RESULT = RESULTS / "checkpoint_stall.md"
STALL_BOUND, CLONE_BOUND, STEP_BOUND = 0.1, 0.5, 1.05
BATCH, MICRO = 16, 4
SIZES = {"layers": 6, "hidden": 512, "heads": 8, "sequence": 64, "vocab": 8192}
GPU_SIZES = {"layers": 12, "hidden": 1024, "heads": 16, "sequence": 1024, "vocab": 32768}
WAYS: dict[str, tuple[str, Options]] = {
    "fp32": ("fp32", Options()),
    "bf16": ("bf16", Options()),
    "ZeRO 1": ("fp32", Options(zero=1)),
    "ZeRO 2": ("fp32", Options(zero=2)),
    "ZeRO 3": ("fp32", Options(zero=3)),
    "offload": ("bf16", Options(offload="optimizer")),
}


HEAD = ("| what | bound | smallest | median | largest |", "|---|---|---|---|---|")


def build_model(sizes: dict[str, Any]) -> Gpt:
    torch.manual_seed(0)
    return Gpt(**sizes, dropout=0.0)


class Training:
    """One rank's."""

    def __init__(
        self, way: str, folder: Path, local: Path, sizes: dict[str, int], device: torch.device
    ) -> None:
        """`local` is where the copy of a save lies until it is in the store, in `folder`."""
        model, replicas = build_model(sizes), dist.get_world_size()
        shape = (BATCH // replicas, sizes["sequence"] + 1)
        self.batch = {"tokens": torch.randint(sizes["vocab"], shape)}
        dummies = {name: value[:MICRO] for name, value in self.batch.items()}
        self.way, self.folder, self.local = way, folder, local
        stages = ",".join(map(str, range(replicas))) + ";"
        precision, options = WAYS[way]
        self.varuna = Varuna(
            model, stages, dummies, BATCH, MICRO,
            device=device, precision=precision, options=options,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.varuna.parameters(), lr=1e-4)
        self.varuna.set_optimizer(self.optimizer)
        self._count = 0

    def step(self) -> None:
        self.varuna.step(self.batch)
        self.optimizer.step()
        self.varuna.zero_grad()
        synchronize(self.varuna.device)

    def save(self) -> Callable[[], None]:
        """Begin a save; the result waits for its end."""
        self._count += 1
        store, copy = self.folder / "store", self.local / f"copy{dist.get_rank()}"
        done = self.varuna.checkpoint(store, self._count, tempdir=copy, shard=True, keep=1)
        assert done is not None
        return done.result

    def list_saved(self) -> dict[str, Tensor]:
        """The tensors that this rank's part of a checkpoint holds."""
        progress = self.varuna._build_progress()
        part = self.varuna.saving.take_part(progress, 0, True)
        held = [entry for entries in part.segments.values() for entry in entries]
        return {f"{e.kind}/{e.name}{e.box}": e.load() for e in held}


def time_s(work: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def save_by_dcp(tensors: dict[str, Tensor], folder: Path) -> float:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    own = {f"{dist.get_rank()}/{name}": tensor for name, tensor in tensors.items()}
    done: Any = None

    def begin() -> None:
        nonlocal done
        with contextlib.redirect_stderr(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = dcp.async_save(own, checkpoint_id=str(folder))

    took = time_s(begin)
    done.result()
    return took


def measure(
    way: str, folder: Path, local: Path, rounds: int, sizes: dict[str, int], device: torch.device
) -> dict[str, list[float]]:
    training = Training(way, folder, local, sizes, device)

    def clone(tensors: dict[str, Tensor]) -> None:
        copies = [tensor.clone() for tensor in tensors.values()]
        synchronize(device)
        copies.clear()

    draw = random.Random(0)
    found: dict[str, list[float]] = {"stall": [], "clone": [], "dcp": [], "plain": [], "after": []}
    for _ in range(2):
        training.step()
    for number in range(rounds + 1):
        took: dict[str, float] = {}
        for name in draw.sample(["plain", "after"], 2):
            gc.collect()  # what other ways have left
            if name == "plain":
                took["plain"] = time_s(training.step)
                continue
            done: list[Callable[[], None]] = []
            took["stall"] = time_s(lambda: done.append(training.save()))  # noqa: B023
            took["after"] = time_s(training.step)
            done[0]()
            dist.barrier()
        tensors = training.list_saved()
        gc.collect()
        took["clone"] = time_s(lambda: clone(tensors))  # noqa: B023
        took["dcp"] = save_by_dcp(tensors, folder / "dcp")
        dist.barrier()
        if number:  # the first round makes buffers and folders
            for name, seconds in took.items():
                found[name].append(seconds)
    training.varuna.close()
    return found


def render_bounds(way: str, found: dict[str, list[float]], *, bounded: bool = True) -> list[str]:
    """Rows of figures beside their bounds."""
    rows = []
    for what, (first, second), bound in (
        ("stall / DCP's async_save", ("stall", "dcp"), STALL_BOUND),
        ("stall / cloning the same tensors", ("stall", "clone"), CLONE_BOUND),
        ("step after a save / one without", ("after", "plain"), STEP_BOUND),
    ):
        each = sorted(a / b for a, b in zip(found[first], found[second], strict=True))
        middle = statistics.median(each)
        limit = bound if bounded else ""
        rows.append(f"| {way}: {what} | {limit} | {each[0]:.3f} | {middle:.3f} | {each[-1]:.3f} |")
    return rows


def describe(way: str, found: dict[str, list[float]]) -> str:
    """Return a sentence with the milliseconds of a stall and of a step."""
    stall, step = (statistics.median(found[name]) * 1e3 for name in ("stall", "plain"))
    return f"{way}: a stall of {stall:.1f} ms, steps of {step:.0f} ms."


def measure_on_gpu(rounds: int) -> None:
    kind = find_kind()
    if kind is None:
        sys.exit("Not run: no GPU here.")
    os.environ[VARIABLE] = kind
    device, sizes = choose_device(), GPU_SIZES if kind == "cuda" else SIZES
    rows: list[str] = []
    figures: list[str] = []
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory(dir=ROOT) as memory:
        folder = Path(made)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        for place, local in (("a RAM disk", Path(memory)), ("a disk", folder / "local")):
            store = folder / place
            found = measure("bf16", store, local, rounds, sizes, device)
            shutil.rmtree(store)
            rows += render_bounds(f"copy on {place}", found, bounded=not rows)
            figures.append(describe(f"A copy on {place}", found))
        dist.destroy_process_group()
    millions = sum(weight.numel() for weight in build_model(sizes).parameters()) / 1e6
    print(f"{millions:.0f} million parameters in bf16 with AdamW, {rounds} rounds.\n")
    print("\n".join([*HEAD, *rows, "", *figures]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--gpu", action="store_true", help="one process, on a GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.gpu:
        if options.write:
            parser.error(f"--write is for {RESULT.name}, which is of processors")
        measure_on_gpu(options.rounds)
        return
    dist.init_process_group("gloo")
    rows: list[str] = []
    figures = []
    millions = sum(weight.numel() for weight in build_model(SIZES).parameters()) / 1e6
    for way in options.ways:
        name = tempfile.mkdtemp(dir=".", prefix=".stall-")
        shared = [name]
        dist.broadcast_object_list(shared)
        try:
            folder = Path(shared[0])
            found = measure(way, folder, folder, options.rounds, SIZES, CPU)
            rows += render_bounds(way, found)
            figures.append(describe(way, found))
        finally:
            dist.barrier()
            for made in {name, shared[0]}:
                shutil.rmtree(made, ignore_errors=True)
        if dist.get_rank() == 0:
            print(figures[-1], file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        text = "\n".join([
            f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
            f"two replicas with one compute thread each, {millions:.0f} million parameters, "
            f"{options.rounds} rounds.",
            "",
            *HEAD,
            *rows,
            "",
            " ".join(figures),
        ])  # fmt: skip
        print(text)
        if options.write:
            command = "torchrun --nproc-per-node 2 -m benchmarks.runtime.checkpoint_stall"
            RESULT.write_text(
                "# A save beside training, and the steps around it\n\n"
                f"Made by `{command} --rounds {options.rounds} --write`. {text}\n"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Memory and step time where graphs are kept, recomputed, recomputed between products, offloaded.

    python -m benchmarks.runtime.activations [--hidden 256] [--rounds 5] [--write]

A GPT on one rank, gpipe with eight micro-batches, so that all graphs wait for their backward; one
thread. Memory is what a step takes at its peak above what was there before it, in a fresh process:
as torch's allocator was asked for it, each allocation counted, and as the process' resident memory
rose. Steps are timed in one process that holds a model for each way, in rounds of all ways one
after the other; losses must be equal to the bit. On a CPU graphs are offloaded to files in TMPDIR,
which the system keeps in memory where it has some to spare, and the rank waits for it; a GPU copies
beside its work, of which this shows nothing.

What the planner predicts of each way stands beside it, by two profiles that are measured in the
process of the steps, one before them and one after. Predicted memory is that of graphs and of a
running action; gradients, which a plan counts as always there, come into being in the step: before
the peak, but for `none`, whose peak is before the first backward.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from benchmarks import RESULTS
from benchmarks.machine import read_processor
from benchmarks.runtime.rank_memory import MemoryWatch
from varuna_core import Options, Profiler, Varuna
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import PlacedPipeline, StageSite
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.step import find_peaks
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.programs.gpt import Gpt
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.verify import verify

RESULT = RESULTS / "activations.md"
LAYERS, MICRO, NUM_MICROBATCHES, SEQUENCE, VOCAB = 6, 2, 8, 256, 2048
BOUNDS: dict[Recompute, float] = {"none": 1.0, "full": 0.35, "selective": 0.75, "offload": 0.45}
"""Of the allocated peak, over that of none."""

MIB = 2**20


def build_model(hidden: int) -> Gpt:
    return Gpt(
        layers=LAYERS, hidden=hidden, heads=hidden // 64, sequence=SEQUENCE, vocab=VOCAB,
        dropout=0.0,
    )  # fmt: skip


def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


class Training:
    """One way to train."""

    def __init__(self, way: str, hidden: int) -> None:
        torch.manual_seed(0)
        self.batch = {"tokens": torch.randint(VOCAB, (MICRO * NUM_MICROBATCHES, SEQUENCE + 1))}
        model = build_model(hidden)
        dummies, size = {"tokens": self.batch["tokens"][:MICRO]}, MICRO * NUM_MICROBATCHES
        options = Options(schedule="gpipe", recompute=way)  # type: ignore[arg-type]
        self.varuna = Varuna(model, "0;", dummies, size, MICRO, device="cpu", options=options)
        self.optimizer = make_optimizer(list(self.varuna.parameters()))
        self.varuna.set_optimizer(self.optimizer)

    def step(self) -> Tensor:
        loss, _ = self.varuna.step(self.batch)
        self.optimizer.step()
        self.varuna.zero_grad()
        return loss


def print_memory(way: str, hidden: int) -> None:
    """What a step adds: bytes allocated, bytes resident, and the graphs held at once."""
    torch.set_num_threads(1)
    training = Training(way, hidden)
    training.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    watch = MemoryWatch()
    with watch.phase("step"):
        training.step()
    with profile(profile_memory=True) as recorded:
        training.step()
    now = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    held = verify(training.varuna.plans.find(NUM_MICROBATCHES).schedule)
    print(most, watch.phases[0].peak, held.graphs[0])


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one way takes."""

    way: Recompute
    allocated: int
    resident: int
    graphs: int
    seconds: list[float]
    predicted_bytes: float
    predicted_s: list[float]
    """By each profile."""


def measure_memory(way: str, hidden: int) -> list[int]:
    command = [sys.executable, "-m", "benchmarks.runtime.activations"]
    command += ["--hidden", str(hidden), "--memory-of", way]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [int(word) for word in done.stdout.split()[-3:]]


def predict(hidden: int) -> dict[str, tuple[float, float]]:
    """Of each way the bytes that a step adds and its seconds, by a new profile."""
    profiler = Profiler(build_model(hidden), "cpu", name="gpt")
    profiler.set_optimizer(make_optimizer)

    def make_batch(size: int) -> dict[str, Tensor]:
        return {"tokens": torch.randint(VOCAB, (size, SEQUENCE + 1))}

    with tempfile.TemporaryDirectory() as folder:
        profile = profiler.profile_all(make_batch, [MICRO], folder, links=False)
    training = TrainingModel(batch=MICRO * NUM_MICROBATCHES)
    tables, shape = Tables(profile, training), Shape(tensor=1, replicas=1, micro_batch=MICRO)
    placed = PlacedPipeline((StageSite(("cpu",), (("cpu", 1),), 1),), ())
    whole = 0, profile.model.num_segments
    found: dict[str, tuple[float, float]] = {}
    for way in BOUNDS:
        work = build_schedule_model("gpipe", 1, NUM_MICROBATCHES, way)
        chain = Chain(tables, shape, placed, work)
        (held,) = chain.list_memory(whole)
        (peak,) = find_peaks(chain.compiled, [replace(held, fixed=0.0)])
        found[way] = peak, chain.compute_step(whole)
    return found


def time_steps(hidden: int, rounds: int) -> dict[str, list[float]]:
    """Of each way, in rounds that begin with another one each."""
    trainings = {way: Training(way, hidden) for way in BOUNDS}
    found: dict[str, list[float]] = {way: [] for way in BOUNDS}
    ways = list(BOUNDS)
    for number in range(rounds + 1):
        losses = {}
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            begin = time.perf_counter()
            losses[way] = trainings[way].step().item()
            if number:
                found[way].append(time.perf_counter() - begin)
        if len(set(losses.values())) > 1:
            raise SystemExit(f"losses differ: {losses}")
    return found


def render(found: Sequence[Figures], gradients: int) -> str:
    kept = found[0]
    lines = [
        "| recompute | graphs at once | allocated, MiB | predicted | allocated / none | bound "
        "| resident, MiB | resident / none |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.way} | {one.graphs} | {one.allocated / MIB:.0f} | {one.predicted_bytes / MIB:.0f} "
        f"| {one.allocated / kept.allocated:.2f} | {BOUNDS[one.way]} "
        f"| {one.resident / MIB:.0f} | {one.resident / kept.resident:.2f} |"
        for one in found
    ]
    lines += [
        "",
        "| recompute | step / none: smallest | median | largest | predicted, by two profiles |",
        "|---|---|---|---|---|",
    ]
    for one in found[1:]:
        ratios = [own / none for own, none in zip(one.seconds, kept.seconds, strict=True)]
        middle = statistics.median(ratios)
        pairs = zip(one.predicted_s, kept.predicted_s, strict=True)
        predicted = ", ".join(f"{own / none:.2f}" for own, none in pairs)
        lines.append(
            f"| {one.way} | {min(ratios):.2f} | {middle:.2f} | {max(ratios):.2f} | {predicted} |"
        )
    measured, predicted_s = statistics.median(kept.seconds), statistics.mean(kept.predicted_s)
    lines += [
        "",
        f"none itself: predicted over measured {predicted_s / measured:.2f}. Gradients take "
        f"{gradients / MIB:.0f} MiB besides.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", choices=list(BOUNDS), help="in a process of its own")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    if options.memory_of:
        print_memory(options.memory_of, options.hidden)
        return
    torch.set_num_threads(1)
    memory = {way: measure_memory(way, options.hidden) for way in BOUNDS}
    before = predict(options.hidden)
    seconds = time_steps(options.hidden, options.rounds)
    after = predict(options.hidden)
    found = [
        Figures(
            way=way,
            allocated=allocated,
            resident=resident,
            graphs=graphs,
            seconds=seconds[way],
            predicted_bytes=before[way][0],
            predicted_s=[before[way][1], after[way][1]],
        )
        for way, (allocated, resident, graphs) in memory.items()
    ]
    gradients = sum(p.numel() * p.itemsize for p in build_model(options.hidden).parameters())
    text = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {read_processor()}; a GPT "
        f"of {LAYERS} layers of {options.hidden}, {NUM_MICROBATCHES} micro-batches of {MICRO} x "
        f"{SEQUENCE}, gpipe on one rank, one thread; {options.rounds} rounds. Losses equal.\n\n"
        f"{render(found, gradients)}\n"
    )
    print(text)
    if options.write:
        command = f"python -m benchmarks.runtime.activations --hidden {options.hidden} --write"
        RESULT.write_text(f"# Memory of activations\n\nMade by `{command}`. {text}")


if __name__ == "__main__":
    main()

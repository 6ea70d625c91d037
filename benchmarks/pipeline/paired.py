"""Two stages, two processes: our schedules, torch's and DeepSpeed's pipeline engine, and theory."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.pipeline import jobs, models
from benchmarks.pipeline.ranks import gather, run_ranks, serve
from benchmarks.pipeline.rounds import (
    as_costs,
    average_work,
    build_jobs,
    measure,
    run_rounds,
    simulate_traced,
)
from benchmarks.pipeline.table import Bound, Part, Table, ratios, show_seconds
from varuna_core.runtime.engine.weight_grads import PutOffProduct, WeightGrads
from varuna_core.runtime.split.split import split_model
from varuna_core.runtime.split.stage import Stage
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.generators import build_gpipe, build_one_f_one_b

CHUNK_SIZE = 2
NUM_RANKS = 2
NUM_ALONE = 3
"""Micro-batches of each kind that a stage runs alone in a round."""

MOST_FOR_RARE = 8
"""Micro-batches up to which all of our schedules are run."""

OF_1F1B = 1.01
OF_BEST = {8: 0.945, 16: 0.965}
OF_THEORY = 1.03
FIRST = "torch 1F1B"
CONTENDERS = ("ours zero_bubble", "ours zbv", FIRST, "torch ZBVZeroBubble", "torch DualPipeV")
NUM_DRAWN = 2000


def build_builders(
    options: dict[str, Any], model: models.Gpt, rank: int
) -> list[tuple[str, Callable[[], jobs.Job]]]:
    num_microbatches = options["microbatches"]
    batch = model.make_batch(num_microbatches * CHUNK_SIZE)
    builders: list[tuple[str, Callable[[], jobs.Job]]] = []
    for ours in jobs.OURS:
        if ours.rare and num_microbatches > MOST_FOR_RARE:
            continue
        partition = models.even_partition(model, NUM_RANKS * ours.stages_per_rank)
        build = partial(jobs.build_ours, ours, model, batch, CHUNK_SIZE, NUM_RANKS, partition)
        builders.append((ours.name, build))
    torchs = jobs.TORCHS if "torch" in options["parts"] else {"1F1B": 1}
    for name, stages_per_rank in torchs.items():
        stages = models.cut_layers(model, NUM_RANKS * stages_per_rank)
        builders.append(
            (
                f"torch {name}",
                partial(
                    jobs.build_torchs,
                    name,
                    stages,
                    (batch["ids"],),
                    batch["labels"],
                    models.compute_loss,
                    num_microbatches,
                    rank,
                    NUM_RANKS,
                ),
            )
        )
    if "deepspeed" in options["parts"] and jobs.find_deepspeed() is None:
        layers = models.list_layers(model)
        build = partial(
            jobs.build_deepspeed, layers, batch, CHUNK_SIZE, NUM_RANKS, models.compute_loss
        )
        builders.append(("DeepSpeed 1F1B", build))
    only = options.get("only")
    return [one for one in builders if only is None or one[0] in only]


class Alone:
    """This rank's stages without messages, all ranks at once: what theory starts from."""

    def __init__(self, model: models.Gpt, stages_per_rank: int, rank: int) -> None:
        self.batch = model.make_batch(CHUNK_SIZE)
        self.width = model.head.norm.normalized_shape[0]
        num_stages = NUM_RANKS * stages_per_rank
        placing = jobs.Ours(schedule="", stages_per_rank=stages_per_rank)
        held = [i for i, owner in enumerate(placing.map_stages(NUM_RANKS)) if owner == rank]
        self.grads = WeightGrads()
        self.stages: list[tuple[Stage, Stage]] = []
        partition = models.even_partition(model, num_stages)
        for index in held:
            plain, later = (
                split_model(
                    copy.deepcopy(model), self.batch, num_stages, partition, device="cpu"
                ).make_stage(index)
                for _ in range(2)
            )
            self.grads.install(later.module)
            self.stages.append((plain, later))
        self.rounds: list[dict[tuple[str, int], float]] = []

    def measure(self) -> None:
        """One round: seconds a kind and stage."""
        taken: dict[tuple[str, int], list[float]] = {}
        for plain, later in self.stages:
            for _ in range(NUM_ALONE):
                for stage, kinds in ((plain, "FB"), (plain, "fRB"), (later, "FIW")):
                    for kind, seconds in self._run(stage, kinds):
                        taken.setdefault((kind, stage.index), []).append(seconds)
            for stage in (plain, later):
                for parameter in stage.parameters().values():
                    parameter.grad = None
        self.rounds.append({key: sum(v) / len(v) for key, v in taken.items()})

    def _run(self, stage: Stage, kinds: str) -> list[tuple[str, float]]:
        shape = (CHUNK_SIZE, self.batch["ids"].shape[1], self.width)
        received = None if stage.is_first else [torch.randn(shape)]
        gradient = None if stage.is_last else torch.randn(shape)
        taken: list[tuple[str, float]] = []
        output: Any = None
        work: list[PutOffProduct] = []
        for kind in kinds:
            begin = time.perf_counter()
            if kind in "FfR":
                with torch.set_grad_enabled(kind != "f"):
                    output = stage.forward(self.batch, received)
            elif kind in "BI":
                with self.grads.collecting() if kind == "I" else nullcontext(work) as work:
                    torch.autograd.backward(
                        output if stage.is_last else output.tensors[0],
                        gradient,
                    )
            else:
                for put_off in work:
                    put_off()
            taken.append((kind, time.perf_counter() - begin))
        return taken


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """In a rank."""
    torch.manual_seed(0)
    model = models.Gpt()
    built, missing = build_jobs(build_builders(options, model, rank))
    alone: dict[int, Alone] = {}
    if "theory" in options["parts"]:
        depths = {len(job.placement) // world for job in built if job.placement}
        alone = {depth: Alone(model, depth, rank) for depth in sorted(depths)}

    def each_round() -> None:
        for stages in alone.values():
            torch.distributed.barrier()
            stages.measure()

    run_rounds(built, options["rounds"], rank, each_round=each_round)
    measured = measure(built, world)
    depths_measured = {
        depth: [
            {key: value for ranks in per_round for key, value in ranks.items()}
            for per_round in zip(*gather(stages.rounds[1:], world), strict=True)
        ]
        for depth, stages in alone.items()
    }
    theory: dict[str, dict[str, list[float]]] = {}
    for job in built:
        result = measured[job.name]
        traces = result.pop("traces", None)
        depth = len(job.placement) // world
        if depth in depths_measured:
            theory[job.name] = _compare(
                result["engine"], traces, depths_measured[depth], len(job.placement)
            )
    if 1 in depths_measured:
        theory |= _compare_torchs(measured, depths_measured[1], options["microbatches"], world)
    return {"measured": measured, "theory": theory, "missing": missing}


def _compare(
    spans: list[float],
    traces: list[Any],
    rounds: list[dict[tuple[str, int], float]],
    num_stages: int,
) -> dict[str, list[float]]:
    """Ratios of each round's step to its simulation, by the stages alone and by its own actions."""
    found: dict[str, list[float]] = {"alone": [], "own": []}
    for number, span in enumerate(spans):
        step = [rank[number] for rank in traces]
        for name, seconds in (("alone", rounds[number]), ("own", average_work(step))):
            costs = partial(as_costs, seconds, num_stages)
            found[name].append(span / simulate_traced(step, costs))
    return found


def _compare_torchs(
    measured: dict[str, Any],
    rounds: list[dict[tuple[str, int], float]],
    num_microbatches: int,
    world: int,
) -> dict[str, dict[str, list[float]]]:
    """Torch's schedules whose order is ours too."""
    found = {}
    for name, build in (("torch 1F1B", build_one_f_one_b), ("torch GPipe", build_gpipe)):
        if name in measured:
            schedule = build(world, num_microbatches)
            theories = [simulate(schedule, as_costs(each, world)).makespan for each in rounds]
            found[name] = {"alone": ratios(measured[name]["step"], theories), "own": []}
    return found


def run(options: dict[str, Any]) -> Part:
    """In the parent: every number of micro-batches, the tables, the bounds."""
    part = Part(title="Two stages, two processes")
    size = sum(p.numel() for p in models.Gpt().parameters()) / 1e6
    part.notes.append(
        f"GPT of 8 blocks, width 448, {size:.1f} M parameters, sequences of 128, micro-batches of "
        f"{CHUNK_SIZE}, fp32 over gloo. A step is forward and backward; of ours the engine's part, "
        "and beside it the whole `Varuna.step`, which also splits the batch, makes the gradient "
        "norm and agrees on loss and norm. Torch's scales the gradients by 1/m at its end, "
        "DeepSpeed's sums the loss and calls an optimizer that does nothing."
    )
    if "deepspeed" in options["parts"] and (reason := jobs.find_deepspeed()):
        part.notes.append(f"DeepSpeed: not measured: {reason}.")
    for num_microbatches in options["microbatches"]:
        result = run_ranks(
            __name__,
            NUM_RANKS,
            {**options, "microbatches": num_microbatches},
            environment={"DS_ACCELERATOR": "cpu"},
        )
        _tabulate(part, result, num_microbatches, options["parts"])
    return part


def run_best(options: dict[str, Any]) -> Part:
    """Our best schedules against torch's best, round by round, as often as the rounds say."""
    part = Part(title="Our best schedule and torch's, two stages, two processes")
    names = ", ".join(name for name in CONTENDERS if name != FIRST)
    part.notes.append(
        f"The GPT of the part `torch`. {names} and {FIRST} take turns in each round; of ours the "
        f"engine's part is timed. The interval is that of the median, by {NUM_DRAWN} samples of "
        "the rounds with repetition."
    )
    for num_microbatches in options["microbatches"]:
        given = {**options, "microbatches": num_microbatches, "only": CONTENDERS}
        result = run_ranks(__name__, NUM_RANKS, {**given, "parts": ["torch"]})
        steps = {
            name: times.get("engine", times["step"]) for name, times in result["measured"].items()
        }
        table = Table(title=f"{num_microbatches} micro-batches, over torch's 1F1B")
        middle = {name: table.add(name, ratios(each, steps[FIRST])) for name, each in steps.items()}
        part.tables.append(table)
        ours, theirs = (
            min((name for name in middle if name.startswith(who)), key=middle.__getitem__)
            for who in ("ours", "torch")
        )
        each = ratios(steps[ours], steps[theirs])
        low, high = find_interval(each)
        label = f"m={num_microbatches}: {ours} over {theirs}"
        part.notes.append(
            f"{label}: {statistics.median(each):.4f}, interval {low:.4f} to {high:.4f}"
        )
        part.bounds.append(
            Bound(what=f"{label}, upper end of its 90 % interval", value=high, limit=1.0)
        )
    return part


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """Nine tenths of the medians of samples with repetition lie in it."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_DRAWN)
    )
    return medians[NUM_DRAWN // 20], medians[-NUM_DRAWN // 20]


def _tabulate(part: Part, result: dict[str, Any], num_microbatches: int, parts: list[str]) -> None:
    measured = result["measured"]
    base = measured[FIRST]["step"]
    table = Table(
        title=f"{num_microbatches} micro-batches, over torch's 1F1B",
        columns=("seconds", "CPU time, all ranks"),
    )
    middle: dict[str, float] = {}
    for name, times in measured.items():
        steps = times.get("engine", times["step"])
        cpu = f"{statistics.median(ratios(times['cpu'], measured[FIRST]['cpu'])):.3f}"
        own = "" if "engine" in times else cpu
        middle[name] = table.add(name, ratios(steps, base), show_seconds(steps), own)
        if "engine" in times:
            whole = times["step"]
            table.add(f"{name}, whole step", ratios(whole, base), show_seconds(whole), cpu)
    part.tables.append(table)
    part.notes += [f"m={num_microbatches}, not measured: {each}" for each in result["missing"]]
    mine = {name: value for name, value in middle.items() if name.startswith("ours")}
    torchs = {name: value for name, value in middle.items() if name.startswith("torch")}
    best, best_torch = min(mine, key=mine.__getitem__), min(torchs, key=torchs.__getitem__)
    told = f"m={num_microbatches}"
    if "ours 1f1b" in mine:
        part.bounds.append(
            Bound(what=f"{told}: ours 1f1b over {FIRST}", value=mine["ours 1f1b"], limit=OF_1F1B)
        )
    if num_microbatches in OF_BEST:
        bound = OF_BEST[num_microbatches]
        part.bounds.append(
            Bound(what=f"{told}: our best ({best}) over {FIRST}", value=mine[best], limit=bound)
        )
    if "torch" in parts:
        fastest, theirs = (
            measured[name].get("engine", measured[name]["step"]) for name in (best, best_torch)
        )
        against = statistics.median(ratios(fastest, theirs))
        part.bounds.append(
            Bound(what=f"{told}: {best} over torch's best ({best_torch})", value=against, limit=1.0)
        )
    if result["theory"]:
        theory = Table(title=f"{num_microbatches} micro-batches, over the schedule's theory")
        for name, found in result["theory"].items():
            value = theory.add(f"{name}, from its stages alone", found["alone"])
            if found["own"]:
                theory.add(f"{name}, from its own actions", found["own"])
                part.bounds.append(
                    Bound(what=f"{told}: {name} over its theory", value=value, limit=OF_THEORY)
                )
        part.tables.append(theory)


if __name__ == "__main__":
    serve(work)

"""Rounds of measurements: each runs every job once, in rotating order, so that drift hits all."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline.jobs import Job, Stamp
from benchmarks.pipeline.ranks import gather, pin
from tests.varuna_core.schedule.csv_text import parse_csv
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs

TOLERANCE = 1e-3
"""Of the gradients' norm, relative: all jobs are to compute the same."""


def build_jobs(builders: Sequence[tuple[str, Callable[[], Job]]]) -> tuple[list[Job], list[str]]:
    """The jobs that can be built, and what cannot, with the reason (the same on every rank)."""
    jobs, missing = [], []
    for name, build in builders:
        try:
            jobs.append(build())
        except (ValueError, NotImplementedError) as error:
            missing.append(f"{name}: {str(error).splitlines()[0]}")
    return jobs, missing


def run_rounds(
    jobs: Sequence[Job],
    rounds: int,
    rank: int,
    *,
    same_model: bool = True,
    each_round: Callable[[], None] = lambda: None,
) -> None:
    """A first step of each to warm up, then the rounds.

    `same_model`: all compute the same, each rank on a core of its own.
    """
    norms = {}
    for job in jobs:
        job.clear()
        dist.barrier()
        job.time_step()
        total = torch.tensor(job.sum_squares(), dtype=torch.float64)
        dist.all_reduce(total)
        norms[job.name] = math.sqrt(total.item())
        job.clear()
    if same_model:
        _check_equal(norms)
        pin(rank)
    each_round()
    for job in jobs:
        job.forget()
    gc.collect()
    gc.disable()  # a collection in one job's step is not that job's
    for number in range(rounds):
        turn = number % len(jobs)
        for job in [*jobs[turn:], *jobs[:turn]]:
            job.clear()
            dist.barrier()
            job.time_step()
            job.clear()
        each_round()
        gc.collect()
    gc.enable()


def _check_equal(norms: dict[str, float]) -> None:
    first = next(iter(norms.values()))
    for name, norm in norms.items():
        if abs(norm - first) > TOLERANCE * first:
            raise AssertionError(f"{name}: gradient norm {norm:.6f}, expected {first:.6f}")


def find_spans(stamps: Sequence[Stamp], world: int) -> list[float]:
    """Seconds of each round, from the first rank's begin to the last rank's end, by one clock."""
    return [
        max(end for _, end in ranks) - min(begin for begin, _ in ranks)
        for ranks in zip(*gather(list(stamps), world), strict=True)
    ]


def measure(jobs: Sequence[Job], world: int) -> dict[str, dict[str, Any]]:
    """Seconds of each job, a figure a round; and of ours the traces of all ranks."""
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        result: dict[str, Any] = {"step": find_spans(job.stamps, world)}
        result["cpu"] = [sum(ranks) for ranks in zip(*gather(job.cpu, world), strict=True)]
        if job.engine:
            result["engine"] = find_spans(job.engine, world)
            result["traces"] = gather(job.traces, world)
        results[job.name] = result
    return results


def simulate_traced(traces: Sequence[Sequence[Any]], costs: Callable[[str], Costs]) -> float:
    """The makespan of what the ranks did in one step, with costs for these kinds of action.

    `costs` is given the spellings of all actions.
    """
    rows = [",".join(event[0] for event in rank) for rank in traces]
    schedule = parse_csv("\n".join(rows) + "\n")
    return simulate(schedule, costs("\n".join(rows))).makespan


def average_work(traces: Sequence[Sequence[Any]]) -> dict[tuple[str, int], float]:
    """Seconds of an action by kind and stage: the mean, from when its message was there."""
    taken: dict[tuple[str, int], list[float]] = {}
    for rank in traces:
        for spelled, _, ready, end in rank:
            stage, kind = split_spelling(spelled)
            taken.setdefault((kind, stage), []).append(end - ready)
    return {key: sum(times) / len(times) for key, times in taken.items()}


def split_spelling(spelled: str) -> tuple[int, str]:
    place = next(i for i, letter in enumerate(spelled) if letter.isalpha())
    return int(spelled[:place]), spelled[place]


def as_costs(work: dict[tuple[str, int], float], num_stages: int, spelled: str = "") -> Costs:
    """Costs from seconds a kind and stage; a forward is `f` where that is what the stage ran."""

    def each(kind: str, instead: str) -> tuple[float, ...]:
        return tuple(work.get((kind, s), work.get((instead, s), 0.0)) for s in range(num_stages))

    lines = spelled.replace("\n", ",").split(",")
    runs_f = {split_spelling(cell)[0] for cell in lines if "f" in cell}
    forward = tuple(
        work.get(("f" if s in runs_f else "F", s), work.get(("F", s), 0.0))
        for s in range(num_stages)
    )
    return Costs(
        forward=forward,
        input_grad=each("I", "B"),
        weight_grad=each("W", ""),
        backward=each("B", "I"),
        recompute=each("R", "F"),
    )

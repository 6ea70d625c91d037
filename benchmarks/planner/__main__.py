"""Time of planning, and error of predictions against measurements.

    python -m benchmarks.planner [--limit 60] [--published FOLDER] [--write]

Times are wall clock and, in brackets, processor seconds of the one thread: on a machine that others
use the second says more.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from benchmarks.planner.cases import (
    A10_8,
    GPT2_XL,
    LARGE,
    LLAMA_70B,
    MIXED_8,
    build_gpt2_profile,
    build_large_profile,
    predict_seed,
)
from benchmarks.planner.fasop import Peer, time_in_our_model
from benchmarks.planner.public import render_rows
from benchmarks.planner.vtrain import render_vtrain
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.step import simulate_step
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.result.plan import ShapePlan
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.search import Search, Searched
from varuna_core.planner.search.space import Placements
from varuna_core.schedule.compiled import Compiled, list_costs, list_hops
from varuna_core.schedule.costs import build_even_costs

RESULT = RESULTS / "planner.md"
MEASURED_S = 1.402


def measure(run: Callable[[], Any], rounds: int = 1) -> tuple[Any, str]:
    """The last result, and the shortest round as `wall (processor)`."""
    best = (float("inf"), 0.0)
    for _ in range(rounds):
        began, used = time.perf_counter(), time.process_time()
        result = run()
        best = min(best, (time.perf_counter() - began, time.process_time() - used))
    return result, f"{_say(best[0])} ({_say(best[1])})"


def _say(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def list_small(rounds: int) -> list[str]:
    draw = random.Random(1)
    rows = ["| what | time |", "|---|---|"]
    even = build_even_costs(64, hop=0.1)
    costs, hops = list_costs(even), list_hops(even)

    def make() -> Compiled:
        build_schedule_model.cache_clear()
        return build_schedule_model("1f1b", 64, 512, "none").compiled

    compiled, took = measure(make, rounds)
    rows.append(f"| 1f1b of 64 stages, 512 micro-batches: list and dependencies, once | {took} |")
    _, took = measure(lambda: compiled.run(costs, hops), rounds)
    rows.append(f"| its simulation | {took} |")
    chain, partitions = _draw_candidates(draw, 1000)
    run = lambda: [simulate_step(chain.compiled, chain.build_costs(one)) for one in partitions]  # noqa: E731
    _, took = measure(run)
    rows.append(f"| 1,000 plans of 16 stages, 32 micro-batches, one by one | {took} |")
    _, took = measure(lambda: chain.compute_steps(partitions))
    rows.append(f"| the same at once | {took} |")
    return rows


def _draw_candidates(draw: random.Random, count: int) -> tuple[Chain, list[tuple[int, ...]]]:
    tables = Tables(build_gpt2_profile(), TrainingModel(batch=64, memory_share=1.0))
    shape = Shape(tensor=1, replicas=2, micro_batch=1)
    placements = Placements(MIXED_8, tables.size)
    _, counts = placements.list_counts(1, 2, 16, "orders")
    placed = next(placements.iterate(1, 2, tuple(counts[0])))
    chain = Chain(tables, shape, placed, build_schedule_model("1f1b", 16, 32, "none"))
    cuts = [sorted(draw.sample(range(1, tables.size), 15)) for _ in range(count)]
    return chain, [(0, *cut, tables.size) for cut in cuts]


def list_searches(limit_s: float) -> list[str]:
    rows = [
        "| model | cluster | best plan found | gap, by class of placements | options | "
        "placements looked into | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, batch, cluster, words in (
        (None, 64, MIXED_8, "1 x 4 A100, 7 x 4 A10"),
        (None, 64, A10_8, "8 x 4 A10"),
        (GPT2_XL, 1024, LARGE, "3 kinds x 256"),
        (LLAMA_70B, 1024, LARGE, "3 kinds x 256"),
    ):
        profile = build_gpt2_profile() if model is None else build_large_profile(model)
        searched, took = measure(
            lambda profile=profile, batch=batch, cluster=cluster: Search(
                profile,
                TrainingModel(batch=batch),
                cluster,
                deadline=within(limit_s, time.process_time),
            ).run(),
            3 if cluster is MIXED_8 else 1,
        )
        rows.append(_render_searched(profile.model.name, words, searched, took))
    return rows


def _render_searched(model: str, cluster: str, searched: Searched, took: str) -> str:
    best = searched.best
    counts = "-".join(map(str, np.diff(best.bounds)))
    proofs = "; ".join(f"{one.placement_class}: {one.gap:.1%}" for one in searched.proofs)
    return (
        f"| {model} | {cluster} | {best.step_s:.4f} s: {best.option}, {counts} | {proofs} | "
        f"{searched.num_options} | {searched.num_placements} | {took} |"
    )


def list_peers() -> list[str]:
    """FASOP's search as it is described, beside ours, on the same profile."""
    rows = [
        "| cluster | search | plans | time | best plan | its own estimate | in our model |",
        "|---|---|---|---|---|---|---|",
    ]
    profile, training = build_gpt2_profile(), TrainingModel(batch=64)
    for words, cluster in (("1 x 4 A100, 7 x 4 A10", MIXED_8), ("8 x 4 A10", A10_8)):
        guesses, took = measure(lambda cluster=cluster: Peer(profile, cluster, 64).search(), 3)
        best = next(guess for guess in guesses if guess.fits)
        ours = time_in_our_model(profile, training, best)
        said = "does not fit" if ours is None else f"{ours:.4f} s"
        shape, counts = best.shape, "-".join(map(str, np.diff(best.bounds)))
        rows.append(
            f"| {words} | FASOP, as described | {len(guesses)} | {took} | {shape.replicas} "
            f"replicas, tensor {shape.tensor}, micro-batch {shape.micro_batch}, {counts} | "
            f"{best.step_s:.4f} s | {said} |"
        )
    return rows


def list_terms() -> list[str]:
    rows = ["| term | messages take no time | sends overlap | sends wait |", "|---|---|---|---|"]
    plans = [
        predict_seed(A10_8, free_messages=True),
        *(predict_seed(A10_8, overlap_sends=flag) for flag in (True, False)),
    ]

    def add(name: str, find: Callable[[ShapePlan], float]) -> None:
        rows.append(f"| {name} | " + " | ".join(f"{find(plan):.3f}" for plan in plans) + " |")

    add("work of the slowest stage (stage 1, 11 blocks)", lambda p: p.step.stages[1].work_s)
    add("pipeline", lambda p: p.step.pipeline_s)
    add("sums over replicas beyond it", lambda p: p.step.reduced_s - p.step.pipeline_s)
    add("sum of the tied embedding beyond that", lambda p: p.step.tied_s - p.step.reduced_s)
    add("optimizer (estimate)", lambda p: p.step.optimizer_s)
    add("step", lambda p: p.step.step_s)
    add("error, per cent", lambda p: 100 * (p.step.step_s / MEASURED_S - 1))
    add("the same without the optimizer", lambda p: p.step.tied_s)
    add("error, per cent", lambda p: 100 * (p.step.tied_s / MEASURED_S - 1))
    return rows


WHAT_TERMS_SAY = """\
FASOP's own program says 1.540 s. The model says as much without what that leaves out: 1.531 s with
messages that take no time and no optimizer. Messages (14 of 0.65 ms there and back; four replicas
on one link follow one another) are worth 0.015 s, the optimizer 0.021 s. No order of the terms
comes within 5 %: the pipeline alone is 1.387 s without any message, its gradients are complete only
then, and the sum of the tied embedding over the slow link takes 0.129 s after it by the same
figures. So the figures themselves are above the measurement: the forward times, and the backward as
twice that, would have to be a tenth shorter. They are left as they are: nothing is fitted
to this row."""

WHAT_PLANS_SAY = """\
N2_D1: the slow link (0.115 GB/s) takes 146 ms for a message; what was measured beyond the last
stage's work is 286 ms a micro-batch, which is both directions one after the other with both ends
waiting for them. No one kind of wait suits all plans, though: with replicas on 8-GPU
nodes all of it seems hidden (-4 %, as N2_D2, which sends nothing). Their program does not change
between plans, so either messages of 8 tensor ranks are smaller than the file of sizes says, or the
profile of RTX-3090 with 8 tensor ranks is too slow (2.6 times that with 4). The data do not tell
which, and no choice is made by the rows: the target of 4.5 % is not met. GH200: profiles look too
fast where nothing is sent (N2_D2, N4_D4: -13 %), which no term of a pipeline explains."""


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--limit", type=float, default=60.0, help="processor seconds a search may take"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--published", type=Path, help="folder with sailor/ and vtrain/")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    parts = [
        f"numpy {np.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"one thread; load of the machine {os.getloadavg()[0]:.1f} as it began. Times are wall "
        "clock and, in brackets, processor time.",
        "## Simulation and partition",
        *["\n".join(list_small(options.rounds))],
        f"## Searches, of at most {options.limit:g} s of one processor",
        "\n".join(list_searches(options.limit)),
        "## GPT-2 XL on 8 x 4 A10, measured at 1.402 s",
        "Micro-batch 1, 4 replicas, 8 stages `0-11-8-8-8-8-5-0`, Megatron-LM; forward times and "
        "links as FASOP's authors give them, backward twice the forward; nothing fitted.",
        "\n".join(list_terms()),
        WHAT_TERMS_SAY,
        "## FASOP's search beside ours",
        "Written from its description (benchmarks/planner/fasop.py); GPT-2 XL, batch 64. Ours "
        "is in the table of searches.",
        "\n".join(list_peers()),
    ]
    if options.published is not None:
        parts += [
            "## Published plans (eth-easl/sailor, MIT): OPT-350M",
            "Their profiles and link fits, 1f1b; nothing fitted. A micro-batch counts as no slower "
            "than a larger one in the same profile.",
            "\n".join(render_rows(options.published / "sailor")),
            WHAT_PLANS_SAY,
            "## Published steps (VIA-Research/vTrain, MIT): GPT on A100",
            "A few rates, fitted on the other cells alone; then our simulator. Of the rows of many "
            "nodes there are two models, so each is predicted from the other's alone; the last "
            "line leaves out 16 tensor ranks on nodes of 8, which none of our plans has.",
            "\n".join(render_vtrain(options.published / "vtrain")),
        ]
    text = "\n\n".join(parts)
    print(text)
    if options.write:
        RESULT.write_text(
            "# Planning: how fast, and how near\n\n"
            "Made by `python -m benchmarks.planner --published FOLDER --write`. " + text + "\n"
        )


if __name__ == "__main__":
    main()

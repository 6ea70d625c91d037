"""Eight stages, eight processes, waits for work: deep pipelines, uneven ones, slow links.

even      20 ms for each part of each stage: bounds against torch's 1F1B
uneven    stages of 10 to 30 ms
jitter    each wait up to half longer or shorter
link      one link, between stages 3 and 4, takes as long for a message as a stage for a part
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.pipeline import jobs, network, waits
from benchmarks.pipeline.ranks import run_ranks, serve
from benchmarks.pipeline.rounds import build_jobs, measure, run_rounds, simulate_traced
from benchmarks.pipeline.table import Bound, Part, Table, ratios, show_seconds
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import build_schedule

NUM_STAGES = 8
EVEN = [waits.UNIT_S] * NUM_STAGES
UNEVEN = [waits.UNIT_S * share for share in (1.0, 0.75, 1.25, 1.0, 1.5, 1.0, 0.5, 1.0)]
JITTER = 0.5
SLOW_LINK = 3
"""The link behind this stage."""
RATE_MBIT = 200.0
MESSAGE = int(RATE_MBIT * 1e6 / 8 / 4 * waits.UNIT_S)
"""Elements of a message that takes a unit on the slow link."""
SMALL_MESSAGE = 64
CONDITION_MICROBATCHES = 8
EVEN_TITLE = "even"
"""The condition that has bounds against torch's; the others run three rounds for its five."""

ZERO_BUBBLE_AT_LEAST = {8: 1.35, 16: 1.20}
VARUNA_AT_LEAST = {8: 1.10, 16: 1.06}
AUTO_AT_MOST = 1.02

PLAIN = tuple(jobs.Ours(schedule=name) for name in ("gpipe", "1f1b", "zero_bubble", "auto"))
RECOMPUTING = tuple(
    jobs.Ours(schedule=name, recompute="full") for name in ("1f1b", "varuna", "auto")
)
TORCH, TORCH_RECOMPUTING = "torch 1F1B", "torch 1F1B, recompute"
TORCHS = {TORCH: ("1F1B", False), TORCH_RECOMPUTING: ("1F1B", True)}
TORCHS["torch InterleavedZeroBubble"] = ("InterleavedZeroBubble", False)


def make_costs(seconds: list[float], link_s: float) -> Costs:
    each = tuple(seconds)
    hops = tuple(link_s if s == SLOW_LINK else 0.0 for s in range(NUM_STAGES - 1))
    return Costs(forward=each, input_grad=each, weight_grad=each, hops=hops)


def build_torchs(
    name: str, seconds: list[float], batch: torch.Tensor, num_microbatches: int, rank: int
) -> jobs.Job:
    schedule, recomputed = TORCHS[name]
    stages: list[nn.Module] = [waits.Waiting(s, w, recomputed) for s, w in enumerate(seconds)]
    target = torch.zeros(len(batch))
    job = jobs.build_torchs(
        schedule,
        stages,
        (batch,),
        target,
        waits.compute_loss,
        num_microbatches,
        rank,
        NUM_STAGES,
    )
    job.name = name
    return job


def build_ours(ours: jobs.Ours, costs: Costs, batch: torch.Tensor) -> jobs.Job:
    model = waits.WaitingModel(list(costs.forward))
    partition = "-".join(["1"] * NUM_STAGES)
    return jobs.build_ours(ours, model, {"x": batch}, 1, NUM_STAGES, partition, costs)


def from_step_begin(run: Callable[[], Any]) -> Any:
    waits.jitter.begin_step()
    return run()


def measure_condition(
    condition: dict[str, Any], rounds: int, rank: int, world: int
) -> dict[str, Any]:
    """In a rank: one table."""
    seconds, num_microbatches = condition["seconds"], condition["microbatches"]
    costs = make_costs(seconds, condition["link_s"])
    waits.jitter.share = condition["jitter"]
    batch = torch.rand(num_microbatches, condition["message"])
    builders: list[tuple[str, Callable[[], jobs.Job]]] = []
    for name in condition["torchs"]:
        build = partial(build_torchs, name, seconds, batch, num_microbatches, rank)
        builders.append((name, build))
    for fields in condition["ours"]:
        ours = jobs.Ours(**fields)
        builders.append((ours.name, partial(build_ours, ours, costs, batch)))
    built, missing = build_jobs(builders)
    for job in built:
        job.run = partial(from_step_begin, job.run)
    fewer = rounds if condition["title"] == EVEN_TITLE else -(-rounds * 3 // 5)
    run_rounds(built, fewer, rank, same_model=False)
    measured = measure(built, world)
    for result in measured.values():
        traces = result.pop("traces", None)
        if traces is not None:
            last = [rank_traces[-1] for rank_traces in traces]
            result["theory"] = simulate_traced(last, lambda spelled: costs)
    for job in built:
        job.close()
    return {"measured": measured, "missing": missing}


def work(options: dict[str, Any], rank: int, world: int) -> list[dict[str, Any]]:
    """In a rank: the conditions of one launch."""
    torch.manual_seed(0)
    return [
        measure_condition(condition, options["rounds"], rank, world)
        for condition in options["conditions"]
    ]


def _condition(title: str, num_microbatches: int, **more: Any) -> dict[str, Any]:
    plain = [copy.copy(vars(ours)) for ours in PLAIN]
    base = {"seconds": EVEN, "jitter": 0.0, "message": SMALL_MESSAGE, "link_s": 0.0}
    base |= {"torchs": [TORCH], "ours": plain}
    return {**base, "title": title, "microbatches": num_microbatches, **more}


def run(options: dict[str, Any]) -> Part:
    """In the parent: two launches, one of them over the slow link."""
    part = Part(title="Eight stages, eight processes, timed waits")
    part.notes.append(
        f"Each of forward, input gradient and weight gradient is a wait of {waits.UNIT_S * 1e3:g} "
        "ms, and so is a recompute; torch's recomputes in the backward "
        "(torch.utils.checkpoint). Ours get the costs, as a profile has them. Ratios "
        "over torch's 1F1B, the engine's part of ours; beside them the step over its own "
        "simulation."
    )
    all_of_them = [copy.copy(vars(ours)) for ours in (*PLAIN, *RECOMPUTING)]
    even = [
        _condition(EVEN_TITLE, m, torchs=list(TORCHS), ours=all_of_them)
        for m in options["microbatches"]
    ]
    few = CONDITION_MICROBATCHES
    others = [
        _condition("uneven stages", few, seconds=UNEVEN),
        _condition("jitter", few, jitter=JITTER),
    ]
    link = _condition("slow link", few, message=MESSAGE, link_s=waits.UNIT_S)
    obstacle = network.find_obstacle()
    if obstacle is None:
        with network.slow_link(RATE_MBIT) as sides:
            prefixes = [sides[stage > SLOW_LINK] for stage in range(NUM_STAGES)]
            inside: dict[str, Any] = {
                "prefixes": prefixes,
                "environment": {"GLOO_SOCKET_IFNAME": "eth0"},
            }
            slow = run_ranks(__name__, NUM_STAGES, {**options, "conditions": [link]}, **inside)
    else:
        part.notes.append(f"Slow link: not measured: {obstacle}.")
        slow = []
    quick = run_ranks(__name__, NUM_STAGES, {**options, "conditions": [*even, *others]})
    for condition, result in zip([*even, *others], quick, strict=True):
        _tabulate(part, condition, result)
    for result in slow:
        _tabulate(part, link, result)
    return part


def _tabulate(part: Part, condition: dict[str, Any], result: dict[str, Any]) -> None:
    measured, num_microbatches = result["measured"], condition["microbatches"]
    told = f"{condition['title']}, m={num_microbatches}"
    base = measured[TORCH]["step"]
    costs = make_costs(condition["seconds"], condition["link_s"])
    torch_theory = simulate(build_schedule("1f1b", NUM_STAGES, num_microbatches), costs).makespan
    columns = ("seconds", "simulated", "seconds over simulated")
    table = Table(title=f"{told}, over torch's 1F1B", columns=columns)
    times = {name: each.get("engine", each["step"]) for name, each in measured.items()}
    measured[TORCH]["theory"] = torch_theory
    for name, seconds in times.items():
        theory = measured[name].get("theory")
        middle = statistics.median(seconds)
        more = (f"{theory:.4f}", f"{middle / theory:.3f}") if theory else ("", "")
        table.add(name, ratios(seconds, base), show_seconds(seconds), *more)
    part.tables.append(table)
    part.notes += [f"{told}, not measured: {each}" for each in result["missing"]]
    part.bounds += _list_bounds(told, condition, times)


def _list_bounds(
    told: str, condition: dict[str, Any], times: dict[str, list[float]]
) -> Iterable[Bound]:
    m = condition["microbatches"]
    if condition["title"] == EVEN_TITLE:
        for name, base, limits in (
            ("ours zero_bubble", TORCH, ZERO_BUBBLE_AT_LEAST),
            ("ours varuna, recompute", TORCH_RECOMPUTING, VARUNA_AT_LEAST),
        ):
            if m in limits and name in times:
                faster = statistics.median(ratios(times[base], times[name]))
                what = f"{told}: {name} as fast as {base}, times"
                yield Bound(what=what, value=faster, limit=limits[m], at_least=True)
    for auto, others in (
        ("ours auto", [ours.name for ours in PLAIN]),
        ("ours auto, recompute", [ours.name for ours in RECOMPUTING]),
    ):
        rest = [name for name in others if name in times and name != auto]
        if auto in times and rest:
            best = min(rest, key=lambda name: statistics.median(times[name]))
            value = statistics.median(ratios(times[auto], times[best]))
            what = f"{told}: {auto} over the best of the others ({best})"
            yield Bound(what=what, value=value, limit=AUTO_AT_MOST)


if __name__ == "__main__":
    serve(work)

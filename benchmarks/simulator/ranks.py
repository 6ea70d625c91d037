"""One process of the simulator's benchmark: profiles and steps of every layout in turn.

    the plans' profile
    round 1: links, profile, layout a, layout b, .. ─► round 2: links, profile, layout b, .. ─► ..

The first profile says in which order several stages a rank run their actions, as in a plan; the
others predict. A machine that is slow for a while is then slow for the profile and for the runs.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline import waits
from benchmarks.pipeline.ranks import gather, pin, serve
from benchmarks.simulator.layouts import Launch, Layout, rebuild
from benchmarks.simulator.plans import make_tables, plan
from tests.ranks.device import CPU, choose_device, synchronize
from varuna_core import Options, Profiler, Varuna
from varuna_core.planner.profile.profile import Network
from varuna_core.planner.profile.profile_file import parse_profile, render_profile
from varuna_core.profiling import bench as profiler_bench
from varuna_core.profiling import links as profiler_links
from varuna_core.profiling.links import measure_network
from varuna_core.profiling.ranks import Crew
from varuna_core.programs.gpt import Gpt
from varuna_core.runtime.engine import engine
from varuna_core.schedule.costs import Costs

SIZES = tuple(2**power for power in range(10, 24, 2))
"""Bytes of messages: as the profiler's, up to what a model of this size sends."""
LINK_S = 0.1
"""A size of message is sent for about so long: in every round, so less than the profiler's own."""
SEED = 1


class Job:
    """One layout, ready to take steps."""

    def __init__(self, launch: Launch, layout: Layout, costs: Costs | None) -> None:
        torch.manual_seed(SEED)
        self.events: list[tuple[str, float, float, float]] = []
        batch = make_batch(launch, launch.batch)
        self.varuna = Varuna(
            build_model(launch),
            layout.stage_map,
            make_batch(launch, layout.micro_batch),
            launch.batch,
            layout.micro_batch,
            device=choose_device(),
            options=Options(
                partition="-".join(map(str, layout.counts)),
                schedule=layout.schedule,
                stages_per_rank=layout.stages_per_rank,
                costs=costs,
                recompute=layout.recompute,
                zero=layout.zero,
                trace=lambda *event: self.events.append(event),
            ),
        )
        own = self.varuna.samples
        self.batch = {name: value[own.start : own.stop] for name, value in batch.items()}
        self.optimizer = make_optimizer(list(self.varuna.parameters()))
        self.varuna.set_optimizer(self.optimizer)

    def run(self, steps: int) -> tuple[list[float], list[Any]]:
        """When each step ended, the one before the first too; what the last one's actions took."""
        dist.barrier()
        ends = []
        for _ in range(steps + 1):
            self.events.clear()
            self.varuna.step(self.batch)
            self.optimizer.step()
            self.varuna.zero_grad()
            synchronize(self.varuna.device)
            ends.append(time.perf_counter())
        return ends, list(self.events)


def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-6)


def build_model(launch: Launch) -> Any:
    if launch.model == "waits":
        return waits.WaitingModel(launch.options["seconds"])
    return Gpt(**launch.options)


def make_batch(launch: Launch, size: int) -> dict[str, torch.Tensor]:
    if launch.model == "waits":
        return {"x": torch.ones(size, launch.options["message"])}
    length, vocab = launch.options["sequence"] + 1, launch.options["vocab"]
    return {"tokens": torch.randint(vocab, (size, length))}


def profile_once(launch: Launch, kind: str, sizes: list[int], network: Network) -> str:
    """As `vjob profile` does it; the links were measured just before."""
    torch.manual_seed(SEED)
    profiler = Profiler(
        build_model(launch), choose_device(), name=launch.model, kind=kind, samples=2
    )
    profiler.set_optimizer(make_optimizer)
    with tempfile.TemporaryDirectory() as folder:
        profile = profiler.profile_all(
            lambda size: make_batch(launch, size), sizes, folder, links=False
        )
    return render_profile(replace(profile, network=network))


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """In a rank: one launch."""
    launch = rebuild(options["launch"])
    if options["cpu"]:
        by_thread = SimpleNamespace(perf_counter=time.thread_time)
        engine.time = profiler_bench.time = by_thread  # type: ignore[assignment,attr-defined]  # their own
    os.environ["VJOB_NODE"] = launch.nodes[rank]
    kind = launch.kinds[rank]
    waits.jitter.factor = launch.slow_right if launch.nodes[rank] != launch.nodes[0] else 1.0
    profiler_links.SIZE_S = LINK_S
    crew = Crew(choose_device(), kind)
    sizes = sorted({layout.micro_batch for layout in launch.layouts})
    planned = profile_once(launch, kind, sizes, measure_network(crew, sizes=SIZES))
    tables = make_tables(parse_profile(planned), launch)
    jobs = [Job(launch, one, plan(tables, launch, one).costs) for one in launch.layouts]
    if launch.model == "gpt" and crew.device == CPU:
        pin(rank)
    for job in jobs:
        job.run(1)
    profiles: list[str] = []
    steps: list[list[float]] = [[] for _ in jobs]
    events: list[Any] = [None] * len(jobs)
    for number in range(options["rounds"]):
        network = measure_network(crew, sizes=SIZES)
        profiles.append(profile_once(launch, kind, sizes, network))
        turn = number % len(jobs)
        for place in [*range(turn, len(jobs)), *range(turn)]:
            ends, own = jobs[place].run(options["steps"])
            told = gather((ends, own), world)
            last = [max(each) for each in zip(*(one[0] for one in told), strict=True)]
            steps[place] += [b - a for a, b in itertools.pairwise(last)]
            events[place] = [one[1] for one in told]
    for job in jobs:
        job.varuna.close()
    return {"planned": planned, "profiles": profiles, "steps": steps, "events": events}


if __name__ == "__main__":
    serve(work)

"""Random small profiles and chains for the planner's tests."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np

from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import Boundary, GpuRoute, PlacedPipeline, StageSite
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import (
    HALVES,
    HOST_TIMES,
    TIMES,
    Cell,
    GpuProfile,
    LinkTime,
    Model,
    Network,
    Profile,
    Tie,
    build_link,
)
from varuna_core.schedule.recompute import Recompute

KINDS = ("big", "small")
MICRO_BATCH, TENSOR = 1, 1


def draw_actions(draw: random.Random) -> tuple[float, ...]:
    """Nothing half of the time."""
    if draw.random() < 0.5:
        return (0.0,) * len(TIMES)
    return tuple(draw.uniform(0, 0.3) for _ in TIMES)


def draw_host(draw: random.Random, size: int) -> dict[str, tuple[float, ...]]:
    """Times of the host, mostly not known, or less than the device's."""
    if draw.random() < 0.7:
        return {}
    most = draw.choice([0.3, 1.0, 3.0])
    names = (*HOST_TIMES, "selective_host_s")
    rows = {name: tuple(draw.uniform(0, most) for _ in range(size)) for name in names}
    return {**rows, "action_host_s": draw_actions(draw)}


def make_profile(draw: random.Random, size: int, memory: float = 1e12) -> Profile:
    """Two kinds of GPU, every figure drawn; blocks alike half of the time."""
    even = draw.random() < 0.5
    copying = draw.choice([0.2, 1.0, 3.0])

    def row(scale: float) -> tuple[float, ...]:
        middle = scale * draw.uniform(0.5, 1.5)
        return tuple(
            middle if even and 0 < i < size - 1 else scale * draw.uniform(0.2, 2)
            for i in range(size)
        )

    gpus = {
        kind: GpuProfile(
            memory_bytes=memory,
            cells={
                (micro, tensor): Cell(
                    forward_s=row(micro / tensor),
                    backward_s=row(1.5 * micro / tensor) if draw.random() < 0.5 else (),
                    input_grad_s=row(micro / tensor),
                    weight_grad_s=row(micro / tensor),
                    recompute_s=row(micro / tensor),
                    output_bytes=row(1e6),
                    graph_bytes=row(1e9),
                    work_bytes=row(1e8),
                    selective_s=row(0.3 * micro / tensor),
                    kept_bytes=row(3e8),
                    offload_s=row(copying * micro / tensor),
                    load_s=row(copying * micro / tensor),
                    action_s=draw_actions(draw),
                    **draw_host(draw, size),
                )
                for micro in (1, 2, 4)
                for tensor in (1, 2)
            },
            optimizer_s={1: row(0.3), 2: row(0.2)},
            copies_beside=draw.random() < 0.6,
        )
        for kind in KINDS
    }
    links = {
        (a, b, where): build_link(draw.choice([0.0, 0.3]), 1e-3 / draw.choice([0.01, 0.5]))
        for a in KINDS
        for b in KINDS
        for where in ("intra", "inter")
    }
    counts = tuple(draw.randint(1, 50) * 10**6 for _ in range(size))
    ties = (Tie(segments=(0, size - 1), parameters=10**6),) if draw.random() < 0.5 else ()
    return Profile(
        model=Model(
            name="drawn",
            digest="0",
            num_segments=size,
            parameters={1: counts, 2: tuple(c // 2 for c in counts)},
            ties=ties,
        ),
        software={"torch": "2.13"},
        gpus=gpus,
        network=Network(links=links, all_reduces={}),  # type: ignore[arg-type]
    )


def add_halves(draw: random.Random, profile: Profile) -> Profile:
    """With halves of sums measured for some groups."""
    halves = {
        (half, kind, ranks, on_a_node): build_link(draw.choice([0.0, 0.1]), draw.choice([0.1, 1.0]))
        for half in HALVES
        for kind in KINDS
        for ranks, on_a_node in ((2, 1), (2, 2), (4, 2))
        if draw.random() < 0.5
    }
    return replace(profile, network=replace(profile.network, halves=halves))


def make_placed(draw: random.Random, stages: int, replicas: int) -> PlacedPipeline:
    kinds = [draw.choice(KINDS) for _ in range(stages)]
    sites = tuple(StageSite((kind,), ((kind, replicas),), 1) for kind in kinds)
    boundaries = tuple(
        Boundary((GpuRoute(a, b, "inter", draw.choice([1, replicas])),))
        for a, b in itertools.pairwise(kinds)
    )
    return PlacedPipeline(sites, boundaries)


def make_chain(draw: random.Random) -> Chain:
    """With any schedule of one stage a rank, sends that block or not, memory that binds or not."""
    stages, size = draw.randint(1, 4), draw.randint(4, 8)
    name = draw.choice(["gpipe", "1f1b", "1f1b", "varuna", "zero_bubble"])
    ways: list[Recompute] = ["none", "full", "selective"]
    ways += ["auto"] * (name in ("gpipe", "1f1b")) + ["offload"] * (name != "varuna")
    recompute = draw.choice(ways)
    binds = recompute not in ("none", "full")
    profile = make_profile(draw, size, draw.choice([1e12, 1.3e10 if binds else 1e12, 2e10]))
    training = TrainingModel(
        batch=12,
        overlap_sends=draw.random() < 0.7,
        overlap_reduction=draw.random() < 0.7,
        data_s=draw.choice([0.0, 0.5]),
    )
    replicas = draw.choice([1, 2])
    shape = Shape(
        tensor=TENSOR, replicas=replicas, micro_batch=MICRO_BATCH, zero=draw.choice([0, 1, 2, 3])
    )
    count = draw.randint(1, 7)
    return Chain(
        Tables(add_halves(draw, profile), training),
        shape,
        make_placed(draw, stages, replicas),
        build_schedule_model(name, stages, count, recompute),
        least=draw.choice([0, 1, 1]),
    )


def call_measured(profile: Profile) -> Profile:
    """With links and sums as if measured: those of groups of one kind are what rings take."""
    network = profile.network
    links = {key: replace(link, source="measured") for key, link in network.links.items()}
    sums = {}
    for kind, nodes, each in itertools.product(profile.gpus, range(1, 9), (1, 2, 4)):
        took, _ = network.find_all_reduce([(kind, each)] * nodes, np.array([1.0, 1e9]))
        if nodes * each > 1:
            points = ((1.0, float(took[0])), (1e9, float(took[1])))
            sums[kind, nodes * each, each] = LinkTime(points=points)
    return replace(profile, network=replace(network, links=links, all_reduces=sums))

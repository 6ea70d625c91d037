"""A peer to time beside ours: FASOP's search, made anew from the description of its paper.

What it does (Hwang et al., HPDC '24): tensor degrees up to 4, all GPUs in use, nodes of two kinds
in every rotation of one order; a greedy partition that starts even and takes segments from the
slowest stage; 1f1b with the first stage's message and the last one's gradient alone; the sum over
replicas of the first stage's parameters for all; the tied embedding after it; 18 bytes a parameter
and as many activations as stages on each of them. Plans are sorted by its own estimate; the best
that fits by its own rule is then timed in our model. Nothing of its program was used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.cases import GPT2_XL, INTER_GB_S, INTRA_GB_S
from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.cluster import Cluster, NodeKind, PlacedPipeline, place
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.search.partition import is_allowed

HALF_BYTES = 2
BYTES_EACH = 18
"""Of a parameter: weights, gradients, optimizer."""
ROOM_GB = {"A100": 39.59 * 0.9, "A10": 22.20 * 0.9}
SEND_LOSS, INTRA_LOSS = 1.05, 3.5


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One plan as it sees it."""

    shape: Shape
    placed: PlacedPipeline
    bounds: Bounds
    step_s: float
    fits: bool


class Peer:
    """FASOP's search for GPT-2 XL, on nodes with equal numbers of GPUs."""

    def __init__(self, profile: Profile, cluster: Cluster, batch: int) -> None:
        self.profile, self.cluster, self.batch = profile, cluster, batch
        self.each = cluster.kinds[0].gpus
        self.size = profile.model.num_segments

    def search(self) -> list[Guess]:
        """All plans, the fastest by its estimate first."""
        return sorted(self._iterate(), key=lambda guess: guess.step_s)

    def _iterate(self) -> Iterator[Guess]:
        gpus = self.cluster.num_gpus
        nodes = [kind for kind in self.cluster.kinds for _ in range(kind.count)]
        rotations = [nodes[-i:] + nodes[:-i] for i in range(len(nodes))]
        orders = list(dict.fromkeys(tuple(order) for order in rotations))
        for tensor in (t for t in (1, 2, 4) if self.each % t == 0):
            for stages in range(1, min(gpus // tensor, GPT2_XL.layers) + 1):
                replicas, rest = divmod(gpus // tensor, stages)
                if rest or self.batch % replicas:
                    continue
                share = self.batch // replicas
                for size in (n for n in range(1, share + 1) if share % n == 0):
                    for order in orders:
                        shape = Shape(tensor=tensor, replicas=replicas, micro_batch=size)
                        yield self._guess(shape, order, stages, share // size)

    def _guess(self, shape: Shape, order: tuple[NodeKind, ...], stages: int, count: int) -> Guess:
        placed = place(
            tuple((node, node.gpus) for node in order), stages, shape.tensor, shape.replicas
        )
        assert placed is not None
        # A stage counts as the slowest of its nodes.
        kinds = ["A10" if "A10" in site.kinds else "A100" for site in placed.sites]
        work = []
        for kind in kinds:
            cell = self.profile.estimate_cell(kind, shape.micro_batch, shape.tensor)
            work.append(3 * np.array(cell.forward_s))
        bounds = split_greedily(work)
        took = [
            float(row[a:e].sum())
            for row, (a, e) in zip(work, itertools.pairwise(bounds), strict=True)
        ]
        pipeline = self._time_pipeline(took, shape, placed, kinds, count)
        parameters = self.profile.compute_parameters(shape.tensor)
        sums = self._time_sum(sum(parameters[: bounds[1]]), shape, kinds[0])
        tied = 0.0
        if stages > 1:
            rate = INTER_GB_S * 1e9 / min(shape.replicas, self.each)
            tied = GPT2_XL.hidden * GPT2_XL.vocabulary * HALF_BYTES / rate / shape.tensor
        return Guess(
            shape=shape,
            placed=placed,
            bounds=bounds,
            step_s=pipeline + sums + tied,
            fits=self._fits(shape, bounds, kinds, count),
        )

    def _time_pipeline(
        self, took: list[float], shape: Shape, placed: PlacedPipeline, kinds: list[str], count: int
    ) -> float:
        stages = len(took)
        none = [0.0] * stages
        forward, backward = [t / 3 for t in took], [2 * t / 3 for t in took]
        costs = [*forward, *none, *none, *backward, *none, *none]
        hops = [0.0] * (2 * (stages - 1))
        if stages > 1:
            sent = shape.micro_batch * GPT2_XL.length * GPT2_XL.hidden * HALF_BYTES
            for boundary, hop in ((0, 0), (stages - 2, 2 * stages - 3)):
                rate = INTER_GB_S / shape.replicas / shape.tensor / SEND_LOSS
                if all(route.where == "intra" for route in placed.boundaries[boundary].routes):
                    rate = INTRA_GB_S[kinds[boundary]] / INTRA_LOSS
                hops[hop] = sent / (rate * 1e9)
        compiled = build_schedule_model("1f1b", stages, count, "none").compiled
        return compiled.run(costs, hops).makespan

    def _time_sum(self, parameters: int, shape: Shape, kind: str) -> float:
        n = shape.replicas
        if n == 1:
            return 0.0
        within = n * shape.tensor <= self.each
        rate = (INTRA_GB_S[kind] if within else INTER_GB_S) * 1e9
        if n * shape.tensor >= self.each:
            rate /= shape.tensor
        return 2 * (n - 1) / n * parameters * HALF_BYTES / rate

    def _fits(self, shape: Shape, bounds: Bounds, kinds: list[str], count: int) -> bool:
        parameters = self.profile.compute_parameters(shape.tensor)
        s, h, t = GPT2_XL.length, GPT2_XL.hidden, shape.tensor
        each = s * shape.micro_batch * h * (10 + 24 / t + 5 * GPT2_XL.heads * s / (h * t))
        for kind, (a, e) in zip(kinds, itertools.pairwise(bounds), strict=True):
            blocks = min(e, self.size - 1) - max(a, 1)
            held = BYTES_EACH * sum(parameters[a:e]) + blocks * each * min(len(kinds), count)
            if held > ROOM_GB[kind] * 2**30:
                return False
        return True


def split_greedily(work: list[np.ndarray]) -> Bounds:
    """From an even split, the slowest stage gives a segment to the fastest, while that helps.

    It stops where the slowest has one segment, or is the first or the last stage and has two.
    """
    stages, size = len(work), len(work[0])
    prefix = [np.concatenate([[0.0], np.cumsum(row)]) for row in work]
    bounds = [size * s // stages for s in range(stages + 1)]

    def time_all(cuts: list[int]) -> list[float]:
        return [
            float(p[e] - p[a]) for p, (a, e) in zip(prefix, itertools.pairwise(cuts), strict=True)
        ]

    times = time_all(bounds)
    while True:
        slow, fast = int(np.argmax(times)), int(np.argmin(times))
        held = bounds[slow + 1] - bounds[slow]
        if slow == fast or held == 1 or (held == 2 and slow in (0, stages - 1)):
            return tuple(bounds)
        moved = list(bounds)
        for cut in range(min(slow, fast) + 1, max(slow, fast) + 1):
            moved[cut] += 1 if slow > fast else -1
        after = time_all(moved)
        if not max(after) < max(times) or min(np.diff(moved)) < 1:
            return tuple(bounds)
        bounds, times = moved, after


def time_in_our_model(profile: Profile, training: TrainingModel, guess: Guess) -> float | None:
    """None if it does not fit in memory there."""
    count = training.count_micro_batches(guess.shape.replicas, guess.shape.micro_batch)
    work = build_schedule_model("1f1b", len(guess.placed.sites), count, "none")
    chain = Chain(Tables(profile, training), guess.shape, guess.placed, work)
    return chain.compute_step(guess.bounds) if is_allowed(chain, guess.bounds) else None

"""Describe a plan for people and programs: times, memory, partition, nodes in use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from varuna_core.facts.known import Bounded, Evidence, NotKnown, Sure, Within
from varuna_core.facts.not_covered import Lack, NotCovered, describe_lack
from varuna_core.facts.partition import Partition
from varuna_core.planner.model.cluster import Cluster, PlacedPipeline
from varuna_core.planner.model.step import StepTime, find_away, find_peaks, simulate_step
from varuna_core.planner.model.tables import Tables
from varuna_core.planner.result.band import Band, build_chain, find_band
from varuna_core.planner.result.covered import ESTIMATED, find_lacks, free_links
from varuna_core.planner.search.search import Candidate, Searched
from varuna_core.records.plan import Prediction
from varuna_core.schedule.compiled import unlist_costs
from varuna_core.schedule.costs import Costs


@dataclass(frozen=True, kw_only=True)
class ShapePlan:
    """A layout with everything that is predicted for it."""

    candidate: Candidate
    step: StepTime
    costs: Costs
    """Costs of a micro-batch in seconds."""
    memory_bytes: tuple[float, ...]
    """The most bytes that a GPU of each stage holds, other stages on it included."""
    limit_bytes: tuple[float, ...]
    """The bytes that a GPU of each stage may hold."""
    host_bytes: tuple[float, ...]
    """The most bytes of each rank's graphs in host memory at once."""
    sources: tuple[str, ...]
    """The sources of the figures: measured, interpolated, estimate."""
    price_per_hour: float | None
    """Price of the nodes in use; None if one has no price."""
    band: Band | None
    """The expected range of a step; None if the spread of the figures is not known."""
    lacks: tuple[NotCovered, ...] = ()
    """The parts of the plan that the profile does not cover."""
    at_least_s: float | None = None
    """The band's low end if unmeasured links and sums took no time."""

    @property
    def step_s(self) -> float:
        """Median of the randomly drawn step times; the simulated time without a spread."""
        return self.step.step_s if self.band is None else self.band.middle_s

    @property
    def expected_s(self) -> Bounded[float]:
        """Bounds of a step in nine of ten cases; for estimates in eight of ten."""
        if any(one.lack is Lack.ESTIMATE for one in self.lacks):
            low, high = (self.step_s * bound for bound in (ESTIMATED.low, ESTIMATED.high))
            return Within(low, high, ESTIMATED.evidence)
        lacks = [one for one in self.lacks if isinstance(one.factor, NotKnown)]
        if lacks:
            return NotKnown("; ".join(map(describe_lack, lacks)))
        if self.band is None:
            return NotKnown("the profile does not say how much its times vary: profile again")
        evidence = tuple(
            evidence for one in self.lacks for evidence in getattr(one.factor, "evidence", ())
        )
        profile = Evidence("spread of the profile", Sure.MEASURED)
        return Within(self.band.low_s, self.band.high_s, (profile, *evidence))

    @property
    def band_s(self) -> tuple[float, ...]:
        """The bounds as two times; empty if not known."""
        expected = self.expected_s
        is_band = self.band is not None and isinstance(expected, Within)
        return (expected.low, expected.high) if is_band else ()  # type: ignore[union-attr]

    @property
    def counts(self) -> tuple[int, ...]:
        """Segments of each stage, counting embedding and head."""
        bounds = self.candidate.bounds
        return tuple(e - a for a, e in itertools.pairwise(bounds))

    @property
    def partition(self) -> Partition:
        """The partition as spelled in the conf, counting every segment."""
        return Partition(self.counts)

    @property
    def price_per_step(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour * self.step_s / 3600

    def build_prediction(self) -> Prediction:
        """Return the part of plan.json that `vjob report` compares with the measured steps."""
        return Prediction(
            step_s=self.step_s,
            band_s=self.band_s,
            not_covered=self.lacks,
            stage_s=tuple(stage.work_s for stage in self.step.stages),
            bubble_share=self.step.bubble_share,
            memory_mb=tuple(held / 1e6 for held in self.memory_bytes),
            costs=self.costs.as_json(),
        )


def build_plan(tables: Tables, cluster: Cluster, candidate: Candidate, least: int = 1) -> ShapePlan:
    """Build the plan of a candidate by simulating it again in detail."""
    chain = build_chain(tables, candidate, least)
    kinds = {kind.name: kind for kind in cluster.kinds}
    prices = [kinds[name].price_per_hour for name in candidate.placed.nodes]
    known = [price for price in prices if price is not None]
    step_costs = chain.build_costs(candidate.bounds)
    compiled = chain.compile(candidate.bounds)
    column = step_costs.columns[0]
    memory = chain.list_memory(candidate.bounds)
    peaks, away = find_peaks(compiled, memory), find_away(compiled, memory)
    sources = {source for stage in chain.stages for source in stage.times.sources}
    lacks = tuple(find_lacks(tables.profile, candidate))
    return ShapePlan(
        candidate=candidate,
        step=simulate_step(compiled, step_costs),
        costs=candidate.costs or unlist_costs(column.costs, column.hops),
        memory_bytes=tuple(peaks[place] for place in chain.places),
        host_bytes=tuple(away[place] for place in chain.places),
        limit_bytes=tuple(stage.times.memory_bytes for stage in chain.stages),
        sources=tuple(sorted(sources)),
        price_per_hour=sum(known) if len(known) == len(prices) else None,
        band=find_band(chain, candidate.bounds, lacks),
        lacks=lacks,
        at_least_s=_find_least(tables, candidate, lacks, least),
    )


def _find_least(
    tables: Tables, candidate: Candidate, lacks: Sequence[NotCovered], least: int
) -> float | None:
    """Return the step time without unmeasured links and sums; None if anything else is not known,
    or if sums are part of the actions."""
    open_ones = {one.lack for one in lacks if isinstance(one.factor, NotKnown)}
    if not open_ones or not open_ones <= {Lack.LINK, Lack.SUM} or candidate.option.shape.zero > 1:
        return None
    free = free_links(tables.profile, lacks, candidate)
    chain = build_chain(Tables(free, tables.training), candidate, least)
    band = find_band(chain, candidate.bounds, lacks)
    step = simulate_step(chain.compile(candidate.bounds), chain.build_costs(candidate.bounds))
    sums = step.tied_s - step.pipeline_s + step.exchange_s if Lack.SUM in open_ones else 0.0
    return None if band is None else band.low_s - sums


def explain_simpler(searched: Searched) -> str:
    """Explain why a simpler plan is chosen instead of the fastest."""
    return (
        "the simplest plan that the prediction cannot tell from the fastest one, which takes "
        f"{searched.best.step_s:.4g} s at median times"
    )


def render_table(plan: ShapePlan) -> str:
    """Render a line for each stage: its GPUs, segments, time and memory."""
    rows = [("stage", "GPUs", "segments", "work s", "idle s", "memory GB", "of")]
    for number, (kinds, count) in enumerate(zip(list_stage_kinds(plan), plan.counts, strict=True)):
        stage = plan.step.stages[number]
        rows.append(
            (
                str(number),
                kinds,
                str(count),
                f"{stage.work_s:.3f}",
                f"{stage.idle_s:.3f}",
                f"{plan.memory_bytes[number] / 2**30:.1f}",
                f"{plan.limit_bytes[number] / 2**30:.1f}",
            )
        )
    return align(rows)


def list_stage_kinds(plan: ShapePlan) -> list[str]:
    """Return the kinds of GPU of each stage as phrases."""
    kinds = plan.candidate.placed.kinds
    return [kinds[place] for place in plan.candidate.places]


def align(rows: Sequence[tuple[str, ...]]) -> str:
    """Align cells to the right, with two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


@dataclass(frozen=True, kw_only=True)
class UsedNode:
    """A node of a plan, or several identical nodes in sequence."""

    kind: str
    """Name of the kind of node in the cluster."""
    ranks: int
    """GPUs used on each node; the others stay idle."""
    stages: tuple[int, ...]
    """The stages that these nodes hold."""
    count: int = 1


def list_used_nodes(candidate: Candidate) -> list[UsedNode]:
    """Return the nodes in the order in which stages fill them, which is also the ranks' order."""
    found = list_filled_nodes(candidate.placed, candidate.option.shape.tensor)
    if candidate.stages_per_rank == 1:
        return found
    held = {
        place: [stage for stage, other in enumerate(candidate.places) if other == place]
        for place in candidate.places
    }
    return [
        replace(node, stages=tuple(sorted(s for place in node.stages for s in held[place])))
        for node in found
    ]


def list_filled_nodes(placed: PlacedPipeline, tensor: int) -> list[UsedNode]:
    """Return the nodes that a pipeline with one stage on each rank fills."""
    found: list[UsedNode] = []
    names = iter(placed.nodes)
    for stage, site in enumerate(placed.sites):
        routes = placed.boundaries[stage - 1].routes if stage else ()
        ranks = [count * tensor for _, count in site.group]
        if stage and len(ranks) == 1 and all(route.where == "intra" for route in routes):
            last = found[-1]
            stages = (*last.stages, stage)
            found[-1] = replace(last, ranks=last.ranks + ranks[0], stages=stages)
            continue
        found += [UsedNode(kind=next(names), ranks=each, stages=(stage,)) for each in ranks]
    return found


def join_alike(nodes: list[UsedNode]) -> list[UsedNode]:
    """Join neighbouring nodes of one kind with equal numbers of ranks."""
    joined = []
    for (kind, ranks), group in itertools.groupby(nodes, key=lambda node: (node.kind, node.ranks)):
        held = list(group)
        stages = tuple(sorted({stage for node in held for stage in node.stages}))
        joined.append(UsedNode(kind=kind, ranks=ranks, stages=stages, count=len(held)))
    return joined


def find_left_over(cluster: Cluster, nodes: list[UsedNode]) -> dict[str, tuple[int, int]]:
    """Return the unused nodes of each kind, and the idle GPUs on used nodes."""
    left = {}
    for kind in cluster.kinds:
        used = [node for node in nodes if node.kind == kind.name]
        idle = sum(kind.gpus - node.ranks for node in used)
        if len(used) < kind.count or idle:
            left[kind.name] = kind.count - len(used), idle
    return left

"""Every plan of a small question, timed one by one, beside what a certificate says of them.

Written from docs/planner_model.md and the classes that a certificate names, without the search's
enumeration, bounds and pruning: shapes, orders of nodes and cuts are listed here, a plan's time and
memory are the model's. The time is not asked for of a plan one rank of which cannot be done by
then: it begins after the forwards of the stages before, and has its own work to do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.varuna_core.planner.profiles import add_halves, make_profile
from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.cluster import Cluster, NodeKind, PlacedPipeline, place
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.several import SeveralStages
from varuna_core.planner.model.step import find_peaks
from varuna_core.planner.model.tables import Array, Shape, Tables
from varuna_core.planner.model.training import RECOMPUTES, TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.result.plan import UsedNode, build_plan, list_used_nodes
from varuna_core.planner.result.refusal import search_or_explain
from varuna_core.planner.search.coverage import Coverage, PlanClass
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.search import Candidate, Searched
from varuna_core.planner.search.space import Wishes
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.registry import SCHEDULES

CLOSE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question that is small enough."""

    profile: Profile
    training: TrainingModel
    cluster: Cluster
    wishes: Wishes


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Choices of a plan, except for its placement and its partition."""

    shape: Shape
    schedule: str
    recompute: Recompute
    stages_per_rank: int
    num_microbatches: int


def draw_question(draw: random.Random) -> Asked:
    """Two to six GPUs of one to three kinds, a model of 4 to 10 segments, memory that binds or
    not, some keys fixed."""
    schedule = draw.choice([*SCHEDULES, *[None] * 6])
    is_quick = schedule in ("1f1b", "gpipe", "varuna", "interleaved")  # no orders by costs
    size = draw.choice([4, 5, 6, 8, 10] if is_quick else [4, 4, 5, 5, 6, 7])
    memory = draw.choice([1e12, 1e12, 3e10, draw.uniform(7e9, 2e10)])
    profile = add_halves(draw, make_profile(draw, size, memory))
    names = ["big", "small"]
    if draw.random() < 0.3:
        profile = _add_kind(profile, make_profile(draw, size, memory))
        names.append("odd")
    kinds, left = [], draw.randint(2, 6 if is_quick else 5)
    for name in draw.sample(names, draw.randint(1, len(names))):
        gpus = draw.randint(1, min(3, left))
        count = draw.randint(1, max(1, min(3, left // gpus)))
        left -= gpus * count
        kinds.append(NodeKind(name=f"n-{name}", gpu=name, gpus=gpus, count=count))
        if left < 1:
            break
    ways = (*RECOMPUTES[:2], *(way for way in RECOMPUTES[2:] if draw.random() < 0.3))
    training = TrainingModel(
        batch=draw.choice([2, 3, 4, 4, 6] if is_quick else [2, 3, 4]),
        overlap_sends=draw.random() < 0.8,
        overlap_reduction=draw.random() < 0.7,
        recomputes=ways,
        data_s=draw.choice([0.0, 0.5]),
    )
    cluster = Cluster(kinds=tuple(kinds))
    return Asked(
        profile=profile,
        training=training,
        cluster=cluster,
        wishes=_draw_wishes(draw, training, schedule),
    )


def _add_kind(profile: Profile, other: Profile) -> Profile:
    """With a third kind of GPU, and its links."""
    links = dict(profile.network.links)
    for (a, b, where), link in other.network.links.items():
        if "small" in (a, b):
            names = ("odd" if a == "small" else a, "odd" if b == "small" else b)
            links[(*names, where)] = link
    for name, where in itertools.product(("small", "odd"), ("intra", "inter")):
        links.setdefault((name, "odd", where), links["odd", "odd", where])  # type: ignore[index]
        links.setdefault(("odd", name, where), links["odd", "odd", where])  # type: ignore[index]
    return replace(
        profile,
        gpus={**profile.gpus, "odd": other.gpus["small"]},
        network=replace(profile.network, links=links),
    )


def _draw_wishes(draw: random.Random, training: TrainingModel, schedule: str | None) -> Wishes:
    def some(values: Sequence[int], share: float) -> int | None:
        return draw.choice(values) if draw.random() < share else None

    replicas = [n for n in range(1, training.batch + 1) if training.batch % n == 0]
    return Wishes(
        replicas=some(replicas[:2], 0.4),
        tensor=some([1], 0.6),
        micro_batch=some([1], 0.3),
        zero=some([0, 1], 0.5),
        schedule=schedule,
        recompute="none" if draw.random() < 0.3 and schedule != "varuna" else None,
    )


# All plans.


def list_kinds(asked: Asked) -> Iterator[Kind]:
    """All that the wishes allow, whether or not a search looks at it."""
    wishes, training = asked.wishes, asked.training
    ways = training.recomputes if wishes.recompute is None else (wishes.recompute,)
    most = sum(kind.gpus * kind.count for kind in asked.cluster.kinds)
    for tensor, replicas, size in itertools.product((1, 2), range(1, most + 1), (1, 2, 3, 4, 6)):
        if training.batch % (replicas * size) or size > 4:
            continue
        wanted = ((wishes.tensor, tensor), (wishes.replicas, replicas), (wishes.micro_batch, size))
        if any(wish not in (None, value) for wish, value in wanted):
            continue
        zeros = (0, 1, 2) if wishes.zero is None else (wishes.zero,)
        for name, way, zero in itertools.product(SCHEDULES, ways, zeros):
            if wishes.schedule not in (None, name) or (zero and replicas == 1):
                continue
            kind = SCHEDULES[name]
            if kind.recomputes and way not in ("full", "selective"):
                continue
            if way == "auto" and (kind.count_ahead is None or kind.recomputes):
                continue
            each = [kind.stages_per_rank] if kind.stages_per_rank else range(2, 6)
            for stages_per_rank in each:
                assert stages_per_rank is not None
                yield Kind(
                    shape=Shape(tensor=tensor, replicas=replicas, micro_batch=size, zero=zero),
                    schedule=name,
                    recompute=way,
                    stages_per_rank=stages_per_rank,
                    num_microbatches=training.batch // replicas // size,
                )


def list_placed(cluster: Cluster, tensor: int, replicas: int) -> list[PlacedPipeline]:
    """On every choice of nodes in every order, filled in turn."""
    nodes = [kind for kind in cluster.kinds for _ in range(kind.count)]
    found: dict[PlacedPipeline, None] = {}
    for count in range(1, len(nodes) + 1):
        for order in set(itertools.permutations(nodes, count)):
            for stages in range(1, cluster.num_gpus // (tensor * replicas) + 1):
                placed = place(tuple((n, n.gpus) for n in order), stages, tensor, replicas)
                if placed is not None:
                    found[placed] = None
    return list(found)


def list_cuts(size: int, num_stages: int) -> Array:
    """Every stage has a segment or more."""
    inner = itertools.combinations(range(1, size), num_stages - 1)
    rows = [(0, *cuts, size) for cuts in inner]
    return np.array(rows, dtype=int).reshape(-1, num_stages + 1)


def compute_least(tables: Tables, kind: Kind, placed: PlacedPipeline, beyond: float) -> float:
    """The least time of all its cuts that fit; inf if none takes less than `beyond`."""
    ranks = len(placed.sites)
    if ranks * kind.stages_per_rank > tables.size:
        return float("inf")
    if kind.stages_per_rank > 1 and ranks == 1:
        return float("inf")  # of no use to one rank: its stages run one after another
    cuts = list_cuts(tables.size, ranks * kind.stages_per_rank)
    splits = SCHEDULES[kind.schedule].splits_backward
    if splits and ranks == 1:
        return float("inf")  # it is 1f1b's order
    places = SCHEDULES[kind.schedule].place(ranks, kind.stages_per_rank)
    work = np.full((ranks, len(cuts)), -1.0)
    before = np.zeros(len(cuts))
    for stage, rank in enumerate(places):
        times = tables.compute_times(
            placed.sites[rank].kinds, kind.shape.micro_batch, kind.shape.tensor
        )
        run = cuts[:, stage], cuts[:, stage + 1]
        both = np.minimum(times.backward, times.input_grad + times.weight_grad)[run]
        if (work[rank] < 0).any():
            work[rank] = before
        work[rank] += kind.num_microbatches * (times.forward[run] + both)
        before = before + times.forward[run]
    cuts = cuts[work.max(axis=0) < beyond]
    if not len(cuts):
        return float("inf")
    model = build_schedule_model(
        kind.schedule, ranks, kind.num_microbatches, kind.recompute, kind.stages_per_rank
    )
    if kind.schedule in ("1f1b", "gpipe", "varuna"):
        chain = Chain(tables, kind.shape, placed, model)
    else:
        chain = SeveralStages(tables, kind.shape, placed, model)
    if not splits:
        cuts = cuts[chain.select_fitting(cuts)]
        return float(chain.compute_steps(cuts).min(initial=np.inf)) if len(cuts) else float("inf")
    assert isinstance(chain, SeveralStages)
    return min(_time_in_own_order(chain, tuple(row)) for row in cuts.tolist())


def _time_in_own_order(chain: SeveralStages, cuts: Bounds) -> float:
    """Time of a partition in the order that the runtime makes for its costs; infinity if it does
    not fit in memory."""
    run = chain.follow_costs(chain.compute_costs(cuts))
    peaks = find_peaks(run.compiled, run.list_memory(cuts))
    limits = {p: s.times.memory_bytes for p, s in zip(run.places, run.stages, strict=True)}
    if any(held > limits[rank] for rank, held in enumerate(peaks)):
        return float("inf")
    return run.compute_step(cuts)


# What a certificate says.


def covers(one: PlanClass, kind: Kind) -> bool:
    """The class holds such plans; an empty field stands for any value."""
    return all(
        not values or value in values
        for values, value in (
            (one.stages_per_rank, kind.stages_per_rank),
            (one.schedules, kind.schedule),
            (one.tensor, kind.shape.tensor),
            (one.replicas, kind.shape.replicas),
            (one.micro_batches, kind.shape.micro_batch),
            (one.recomputes, kind.recompute),
            (one.zero, kind.shape.zero),
        )
    )


def check_question(asked: Asked) -> tuple[list[str], dict[str, int]]:
    """Answer a question and try all its plans: what is wrong of the answer, and counts."""
    counts = dict.fromkeys(("answered", "gap 0", "outside", "plans"), 0)
    tables = Tables(asked.profile, asked.training)
    try:
        searched = search_or_explain(
            asked.profile, asked.training, asked.cluster, asked.wishes, deadline=within(1e6)
        )
    except PlanningError as error:
        return list(_check_refusal(asked, tables, str(error), counts)), counts
    counts["answered"] = 1
    counts["gap 0"] = int(searched.gap == 0)
    wrong = list(_check_plan(asked, tables, searched))
    chosen_s = searched.chosen.step_s
    known: dict[tuple[int, int], list[PlacedPipeline]] = {}
    for kind in list_kinds(asked):
        own = [one for one in searched.classes if covers(one, kind)]
        is_out = any(one.coverage is Coverage.NOT for one in own)
        bounds = [one.bound_s for one in own if one.bound_s is not None]
        is_known = bool(bounds) and not is_out
        claim = max(bounds, default=0.0) if is_known else chosen_s
        pair = kind.shape.tensor, kind.shape.replicas
        if pair not in known:
            known[pair] = list_placed(asked.cluster, *pair)
        for placed in known[pair]:
            counts["plans"] += 1
            least = compute_least(tables, kind, placed, claim)
            if not least < claim * (1 - CLOSE):
                continue
            if is_known:
                wrong.append(f"{least} s, said to be {claim} or more: {kind} on {placed.nodes}")
            elif is_out:
                counts["outside"] = 1
            else:
                wrong.append(f"{least} s, better than {claim}, and of no class: {kind}")
    return wrong, counts


def _check_refusal(
    asked: Asked, tables: Tables, said: str, counts: dict[str, int]
) -> Iterator[str]:
    """Nothing fits that the wishes allow; of ways that a search leaves out nothing is said."""
    for kind in list_kinds(asked):
        if kind.stages_per_rank > 1 and kind.recompute not in ("none", "full"):
            continue
        if kind.shape.zero == 2 or kind.stages_per_rank > 4:
            continue
        for placed in list_placed(asked.cluster, kind.shape.tensor, kind.shape.replicas):
            counts["plans"] += 1
            least = compute_least(tables, kind, placed, float("inf"))
            if least < float("inf"):
                yield f"refused ({said.splitlines()[0]}), but {kind} takes {least} s"
                return


def _check_plan(asked: Asked, tables: Tables, searched: Searched) -> Iterator[str]:
    """The chosen plan fits, and takes what is said when it is built again from what is printed."""
    plan = build_plan(tables, asked.cluster, searched.chosen, asked.wishes.least)
    held = zip(plan.memory_bytes, plan.limit_bytes, strict=True)
    if any(used > limit for used, limit in held):
        yield f"it does not fit: {plan.memory_bytes} of {plan.limit_bytes}"
    again = rebuild(asked, tables, searched.chosen, plan.counts, plan.costs)
    if abs(again - searched.chosen.step_s) > CLOSE * again:
        yield f"{searched.chosen.step_s} s, and {again} s as printed"
    if searched.bound_s > searched.chosen.step_s or searched.gap < 0:
        yield f"bound {searched.bound_s} above the plan's {searched.chosen.step_s}"


def rebuild(
    asked: Asked, tables: Tables, chosen: Candidate, counts: Sequence[int], costs: Costs
) -> float:
    """The time of a plan from its nodes, cuts, schedule and costs, as they are printed."""
    option = chosen.option
    kinds = {kind.name: kind for kind in asked.cluster.kinds}
    nodes = list_used_nodes(chosen)
    held = tuple((kinds[node.kind], _count_own(node)) for node in nodes)
    ranks = len(chosen.placed.sites)
    placed = place(held, ranks, option.shape.tensor, option.shape.replicas)
    assert placed is not None, held
    each = len(counts) // ranks
    bounds = (0, *itertools.accumulate(counts))
    model = build_schedule_model(
        option.schedule, ranks, option.num_microbatches, option.recompute, each
    )
    if option.schedule in ("1f1b", "gpipe", "varuna") or chosen.order is None:
        return Chain(tables, option.shape, placed, model).compute_step(bounds)
    chain = SeveralStages(tables, option.shape, placed, model)
    return chain.follow_costs(costs).compute_step(bounds)


def _count_own(node: UsedNode) -> int:
    return max(1, len(node.stages))

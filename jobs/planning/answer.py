"""Compute the planner's answer to a question: ranked plans, proof, cost against time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from varuna_core.facts.known import Evidence, Sure, Value, as_json
from varuna_core.planner.model.tables import Tables
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.result.certificate import render_certificate
from varuna_core.planner.result.front import (
    Front,
    PricedPlan,
    choose_by_deadline,
    choose_within_budget,
    compute_front,
)
from varuna_core.planner.result.plan import (
    ShapePlan,
    build_plan,
    explain_simpler,
    find_left_over,
    join_alike,
    list_stage_kinds,
    list_used_nodes,
)
from varuna_core.planner.result.refusal import search_or_explain
from varuna_core.planner.search.coverage import PlanClass
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.search import Candidate, Searched
from vjob.jobs.planning.question import Question

FRONT_SHARE = 0.25
"""Share of the time limit kept for the table of cost against time."""
MOST_FRONT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The planner's answer to one question."""

    question: Question
    searched: Searched
    plans: tuple[ShapePlan, ...]
    """The chosen plan, then the others that were found, fastest first."""
    chosen_for: str
    """Why the first plan was chosen although it is not the fastest; empty if it is the fastest."""
    front: Front | None
    """Cost against time; None if prices are missing."""

    @property
    def best(self) -> ShapePlan:
        return self.plans[0]

    @property
    def is_certified(self) -> bool:
        """True if the certificate covers the first plan, which no budget or deadline chose."""
        return self.best.candidate == self.searched.chosen


def find_answer(
    question: Question,
    *,
    limit_s: float,
    top: int,
    budget: float | None = None,
    deadline_h: float | None = None,
) -> Answer:
    """Search for plans; raise PlanningError if there is none, or none within budget or deadline."""
    profile, training, cluster = question.profile, question.training, question.cluster
    wishes, deadline = question.wishes, within(limit_s)
    is_priced = all(kind.price_per_hour is not None for kind in cluster.kinds)
    is_chosen = budget is not None or deadline_h is not None
    has_front = is_chosen or is_priced
    searched = search_or_explain(
        profile,
        training,
        cluster,
        wishes,
        deadline=deadline.part(1 - FRONT_SHARE if has_front else 1.0),
        may_have_zero_3=question.may_have_zero_3,
    )
    candidates = list(searched.candidates)
    chosen, chosen_for = searched.best, ""
    if searched.simpler is not None:
        chosen, chosen_for = searched.simpler, explain_simpler(searched)
    front = None
    if has_front:
        short = within(min(deadline.left_s, MOST_FRONT_S))
        front = compute_front(profile, training, cluster, wishes, candidates, deadline=short)
    if front is not None and is_chosen:
        offer, chosen_for = choose_offer(front, question.steps, budget, deadline_h)
        chosen = offer.candidate
    candidates = [chosen, *(one for one in candidates if one != chosen)]
    tables = Tables(profile, training)
    return Answer(
        question=question,
        searched=searched,
        plans=tuple(build_plan(tables, cluster, one, wishes.least) for one in candidates[:top]),
        chosen_for=chosen_for,
        front=front,
    )


def choose_offer(
    front: Front, steps: int, budget: float | None, deadline_h: float | None
) -> tuple[PricedPlan, str]:
    """Choose a plan by the budget or the deadline of the whole run, and say in words for what it
    was chosen; given both, choose the fastest plan within the budget."""
    if budget is None:
        assert deadline_h is not None
        offer = choose_by_deadline(front, deadline_h * 3600 / steps)
        return offer, f"the cheapest plan for {steps} steps within {deadline_h:g} h"
    offer = choose_within_budget(front, budget / steps)
    if deadline_h is not None and offer.step_s * steps > deadline_h * 3600:
        raise PlanningError(
            f"within a budget of {budget:g}, {steps} steps take "
            f"{offer.step_s * steps / 3600:.3g} h, but the deadline is {deadline_h:g} h: raise "
            "the budget or the deadline"
        )
    return offer, f"the fastest plan within {budget:g} for {steps} steps"


def build_json(answer: Answer) -> dict[str, Any]:
    question, searched = answer.question, answer.searched
    found: dict[str, Any] = {
        "format": 3,
        "model": question.profile.model.name,
        "batch": question.training.batch,
        "steps": question.steps,
        "basis": question.basis,
        "is_estimate": question.is_estimate,
        "notes": list(question.notes),
        "chosen_for": answer.chosen_for,
        "plans": [_show_plan(plan, question) for plan in answer.plans],
        "certificate": {
            "text": render_certificate(searched),
            "bound_s": searched.bound_s,
            "gap": as_json(_weigh_gap(searched)),
            "classes": [_show_class(one) for one in searched.classes],
            "num_options": searched.num_options,
            "took_s": searched.took_s,
        },
    }
    if answer.front is not None:
        found["front"] = [
            {"step_s": one.step_s, "price_per_step": one.price, "plan": describe(one.candidate)}
            for one in answer.front.offers
        ]
    return found


def _weigh_gap(searched: Searched) -> Value[float]:
    """Return the gap over all searched classes; its evidence has the number of shapes that were
    searched completely, and the number of all shapes."""
    done, of = (sum(getattr(one, name) for one in searched.classes) for name in ("done", "of"))
    model = Evidence("the planner's model", Sure.ESTIMATED, seen=done, expected=of)
    return Value(searched.gap, (model,))


def _show_class(one: PlanClass) -> dict[str, Any]:
    shown = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(one).items()}
    return {
        **shown,
        "coverage": one.coverage.value,
        "why": None if one.why is None else one.why.value,
    }


def _show_plan(plan: ShapePlan, question: Question) -> dict[str, Any]:
    option, step = plan.candidate.option, plan.step
    nodes = list_used_nodes(plan.candidate)
    return {
        "step_s": plan.step_s,
        "band_s": list(plan.band_s),
        "expected_s": as_json(plan.expected_s),
        "at_least_s": plan.at_least_s,
        "not_covered": [one.as_json() for one in (*question.lacks, *plan.lacks)],
        "parts": dict(list_parts(plan)),
        "bubble_share": step.bubble_share,
        "pipeline": len(plan.candidate.placed.sites),
        "stages": len(plan.counts),
        "replicas": option.shape.replicas,
        "tensor": option.shape.tensor,
        "micro_batch": option.shape.micro_batch,
        "micro_batches": option.num_microbatches,
        "schedule": option.schedule,
        "recompute": option.recompute,
        "zero": option.shape.zero,
        "partition": plan.partition.spell(),
        "stage_kinds": list_stage_kinds(plan),
        "stage_work_s": [stage.work_s for stage in step.stages],
        "memory_bytes": list(plan.memory_bytes),
        "limit_bytes": list(plan.limit_bytes),
        "host_bytes": list(plan.host_bytes),
        "nodes": [
            {"kind": n.kind, "count": n.count, "ranks": n.ranks, "stages": list(n.stages)}
            for n in join_alike(nodes)
        ],
        "left_over": {
            kind: {"nodes": nodes, "gpus": gpus}
            for kind, (nodes, gpus) in find_left_over(question.cluster, nodes).items()
        },
        "sources": list(plan.sources),
        "price_per_step": plan.price_per_step,
        "price_of_run": None
        if plan.price_per_step is None
        else plan.price_per_step * question.steps,
        "run_s": plan.step_s * question.steps,
    }


def list_parts(plan: ShapePlan) -> Mapping[str, float]:
    """Return the parts of a step, in seconds."""
    step = plan.step
    return {
        "data wait": step.data_s,
        "pipeline": step.pipeline_s,
        "uneven actions": plan.step_s - step.step_s,
        "sums over replicas": step.reduced_s - step.pipeline_s,
        "tied weights": step.tied_s - step.reduced_s,
        "optimizer": step.optimizer_s,
        "weights back": step.exchange_s,
    }


def describe(candidate: Candidate) -> str:
    """Format a plan in one line."""
    where = ", ".join(
        f"{node.count} x {node.kind}" for node in join_alike(list_used_nodes(candidate))
    )
    return f"{count_stages(candidate)}, {candidate.option}, on {where}"


def count_stages(candidate: Candidate) -> str:
    ranks = len(candidate.placed.sites)
    if candidate.stages_per_rank == 1:
        return f"{ranks} stage{'s' if ranks > 1 else ''}"
    return f"{len(candidate.bounds) - 1} stages on {ranks} ranks"

"""Render a planner's answer as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from varuna_core.facts.known import NotKnown, Within
from varuna_core.facts.not_covered import describe_lack
from varuna_core.planner.result.certificate import render_certificate
from varuna_core.planner.result.covered import ESTIMATED
from varuna_core.planner.result.plan import (
    ShapePlan,
    align,
    find_left_over,
    join_alike,
    list_used_nodes,
    render_table,
)
from varuna_core.records.formatting import format_duration
from vjob.jobs.planning.answer import Answer, count_stages, describe, list_parts
from vjob.jobs.planning.plan_file import spell_layout
from vjob.jobs.planning.question import Question


def render_answer(answer: Answer) -> str:
    """Format the whole answer for a terminal, the chosen plan first."""
    return "\n".join(
        [
            *_format_question(answer.question),
            "",
            *_format_best(answer),
            "",
            *_format_others(answer),
            *_format_front(answer),
        ]
    )


def _format_question(question: Question) -> Iterator[str]:
    nodes = " + ".join(
        f"{kind.count} x {kind.gpus} {kind.gpu} ({kind.name})" for kind in question.cluster.kinds
    )
    yield f"{question.profile.model.name}, batch {question.training.batch}, on {nodes}"
    head = "ESTIMATE: times rest on " if question.is_estimate else "times: "
    yield head + question.basis
    if question.is_estimate:
        yield (
            "  an estimate ranks layouts, but its step times may be far off; `vjob profile CONF` "
            "measures them (docs/profiling.md)"
        )
    yield from (f"  {note}" for note in question.notes)


def _format_best(answer: Answer) -> Iterator[str]:
    plan, question = answer.best, answer.question
    option, step = plan.candidate.option, plan.step
    if answer.chosen_for:
        yield f"{answer.chosen_for}:"
    base = f" (median of simulated steps; {step.step_s:.4g} s at median times)" if plan.band else ""
    yield (
        f"{plan.step_s:.4g} s a step{base}: {count_stages(plan.candidate)}, {option}, "
        f"{option.num_microbatches} micro-batches"
    )
    yield from map(_wrap, _format_expected(plan, question))
    parts = [f"{name} {took:.4g}" for name, took in list_parts(plan).items() if took > 0]
    yield f"  {' + '.join(parts)} s; bubble {100 * step.bubble_share:.1f} %"
    layout = f"; Megatron-Core layout {spell_layout(plan.counts)}" if question.is_megatron else ""
    yield f"  partition {plan.partition}{layout}"
    nodes = list_used_nodes(plan.candidate)
    for node in join_alike(nodes):
        stages = _format_stages(node.stages)
        yield f"  {node.count} x {node.kind}, {node.ranks} ranks each: {stages}"
    for kind, (whole, idle) in find_left_over(question.cluster, nodes).items():
        words = [f"{whole} nodes"] if whole else []
        words += [f"{idle} GPUs of used nodes"] if idle else []
        yield f"  left over of {kind}: {' and '.join(words)}"
    yield (
        f"  {question.steps} steps take {_format_run(plan, question)}"
        + _format_price(plan, question)
    )
    if any(plan.host_bytes):
        yield (
            "  graphs are offloaded: the host needs up to "
            f"{max(plan.host_bytes) / 2**30:.1f} GB of memory for each rank"
        )
    yield ""
    yield render_table(plan)
    yield ""
    if not answer.is_certified:
        yield "certificate of the fastest plan, without a budget or a deadline:"
    yield render_certificate(answer.searched)


def _format_expected(plan: ShapePlan, question: Question) -> Iterator[str]:
    """Yield lines that say how certain the time of a step is, and which parts of the plan were not
    measured."""
    expected = plan.expected_s
    if plan.band_s:
        low, high = plan.band_s
        yield f"nine of ten steps are expected to take {low:.4g} to {high:.4g} s"
    elif isinstance(expected, Within):
        bounds = f"{expected.low:.2g} to {expected.high:.2g}"
        yield (
            f"eight of ten published runs took {ESTIMATED.low:g} to {ESTIMATED.high:g} times such "
            f"an estimate: {bounds} s a step"
        )
    elif plan.at_least_s is not None:
        yield f"a step takes at least {plan.at_least_s:.4g} s; an upper limit is not known"
    else:
        yield "how long a step may take is not known"
    if question.is_estimate:
        return
    for one in (*question.lacks, *plan.lacks):
        yield f"not covered by the profile: {describe_lack(one)}"
    if isinstance(expected, NotKnown) and not plan.lacks:
        yield expected.reason


def _format_run(plan: ShapePlan, question: Question) -> str:
    took, expected = format_duration(plan.step_s * question.steps), plan.expected_s
    if not isinstance(expected, Within):
        return took
    low, high = (format_duration(bound * question.steps) for bound in (expected.low, expected.high))
    return f"{took} ({low} to {high})"


def _wrap(line: str) -> str:
    return textwrap.fill(line, 80, initial_indent="  ", subsequent_indent="    ")


def _format_stages(stages: tuple[int, ...]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if stages[-1] - stages[0] + 1 == len(stages):
        return f"stages {stages[0]} to {stages[-1]}"
    return f"stages {', '.join(map(str, stages))}"


def _format_price(plan: ShapePlan, question: Question) -> str:
    price = plan.price_per_step
    if price is None:
        return "; no prices given (conf key prices, or --prices TYPE=PRICE per node-hour)"
    return f" and cost {price * question.steps:.4g} ({price:.4g} a step)"


def _format_others(answer: Answer) -> Iterator[str]:
    if len(answer.plans) < 2:
        return
    yield "other plans whose steps were simulated:"
    rows: list[tuple[str, ...]] = [
        (
            "",
            "step s",
            "9 of 10",
            "stages",
            "data",
            "tensor",
            "micro",
            "schedule",
            "recompute",
            "zero",
        )
    ]
    for number, plan in enumerate(answer.plans, 1):
        option, shape = plan.candidate.option, plan.candidate.option.shape
        figures = (len(plan.counts), shape.replicas, shape.tensor, shape.micro_batch)
        rows.append(
            (
                str(number),
                f"{plan.step_s:.4g}",
                "-".join(f"{bound:.4g}" for bound in plan.band_s),
                *map(str, figures),
                option.schedule,
                option.recompute,
                str(shape.zero),
            )
        )
    yield align(rows)
    yield ""


def _format_front(answer: Answer) -> Iterator[str]:
    front = answer.front
    if front is None:
        return
    yield "cost against time (no plan that was found is both cheaper and faster):"
    steps = answer.question.steps
    rows = [("step s", "a step", "whole run", "time", "plan")]
    for one in front.offers:
        rows.append(
            (
                f"{one.step_s:.4g}",
                f"{one.price:.4g}",
                f"{one.price * steps:.4g}",
                format_duration(one.step_s * steps),
                describe(one.candidate),
            )
        )
    table = align([row[:-1] for row in rows])
    yield from (f"{line}  {row[-1]}" for line, row in zip(table.splitlines(), rows, strict=True))
    if front.num_left:
        yield f"  {front.num_left} parts of the cluster were not searched, for lack of time"

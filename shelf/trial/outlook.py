"""What the whole run will take: memory, time, cost, start; each with its certainty.

Where the try had the whole run's layout and devices its own measures count, else the planner's: by
a profile, or by data sheets with the error that those had in published runs. What neither knows is
`not known`, with the reason.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.logs.training_log import parse_memory
from vjob.jobs.conf.layout import get_replicas, is_open, require_number
from vjob.jobs.conf.schema import BUILT_IN, JobConf
from vjob.jobs.errors import RefusedError, VjobError
from vjob.jobs.planning.inputs import explain_errors
from vjob.jobs.planning.resolve_auto import KEYS, Resolved
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.node_names import fold_names
from vjob.jobs.submit.submit import Prepared
from vjob.shelf.trial.result import MEASURED, Finding, Row, unknown
from vjob.shelf.trial.smaller import Trial
from vjob.shelf.trial.watching import Seen

if TYPE_CHECKING:
    from varuna_core.planner.result.plan import LayoutPlan

ESTIMATED = "estimated, -75 to +80 %"
"""The error of data sheets in published runs: benchmarks/results/estimates.md."""
FIRST_STEPS = ": first steps, so at most"
"""A try's steps warm up: later ones take less, often by far."""
MEMORY_MODEL = "estimated, nothing was measured"
LIMIT_S = 10.0
"""Of the planner's search."""
NUM_LINES = 500
FULL = 0.97
"""Of a GPU's memory: the driver and NCCL need some."""
NO_CLUSTER = ("controller", "no cluster")
"""Rows of the catalogue for refusals where no cluster answers: they say nothing about the conf."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Slurm's answer about the whole run."""

    start: str = ""
    """`2026-11-23T01:12:00`; empty where it was not asked."""
    nodes: str = ""
    refusal: Finding | None = None
    why_not: str = "this run does not go through Slurm"


def ask_slurm(whole: Prepared) -> Asked:
    """`sbatch --test-only` for each job of the run: when it would start, or why never."""
    scheduler = schedulers.get_scheduler(whole.plan.scheduler)
    if not scheduler.can.test_only:
        return Asked()
    if scheduler.find_obstacle():
        return Asked(why_not=f"{scheduler.title} is not here")
    found = []
    for group, text in whole.scripts.batch.items():
        try:
            found.append(scheduler.test(whole.run, group, text))
        except RefusedError as error:
            if error.row is not None and error.row.name in NO_CLUSTER:
                return Asked(why_not=f"{scheduler.title} does not answer here")
            return Asked(refusal=build_refusal(error), why_not=f"{scheduler.title} refuses it")
        except VjobError:
            return Asked(why_not=f"{scheduler.title} does not answer here")
    starts = [one.start for one in found if one.start is not None]
    if not starts:
        return Asked(why_not=f"{scheduler.title} gives no time")
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(starts)))
    return Asked(start=start, nodes=" ".join(fold_names(one.nodes) for one in found))


def build_refusal(error: VjobError) -> Finding:
    """The finding for a submit that failed."""
    if not isinstance(error, RefusedError):
        head, *more = str(error).splitlines()
        return Finding(what="submit", cause=head, remedy="; ".join(map(str.strip, more)))
    words = "; ".join(line.removeprefix("sbatch: ") for line in error.said)
    cause = f"{error.head}: {words}" if words else error.head
    return Finding(what="submit", cause=cause, remedy=error.remedy)


def find_outlook(
    whole: Prepared, resolved: Resolved, trial: Trial, seen: Seen, asked: Asked
) -> list[Row]:
    """The rows below the first ones."""
    plan, certainty = plan_whole(resolved)
    step_s, sure = find_step_s(trial, seen, plan, certainty)
    rows = [tell_memory(trial, seen, plan, certainty), tell_step(step_s, sure)]
    steps = find_num_steps(resolved.conf, seen)
    rows.append(tell_duration(resolved.conf, step_s, sure, steps))
    rows.append(tell_cost(whole, resolved.conf, step_s, sure, steps))
    rows.append(tell_slurm_start(asked))
    return rows


def plan_whole(resolved: Resolved) -> tuple[LayoutPlan | None, str]:
    """The planner's view of the conf's own layout, and how sure it is, or why there is none."""
    conf = fill_batch(resolved.conf)
    if is_open(conf) or (conf.model is None and conf.parallel.profile is None):
        return None, "the planner does not know the program's model"
    try:
        with explain_errors():
            from varuna_core.planner.model.tables import Tables
            from varuna_core.planner.result.plan import build_plan
            from varuna_core.planner.result.refusal import search_or_explain
            from vjob.jobs.planning.question import PlanOptions, load_question

            base = resolved.path.parent
            conf = replace(conf, parallel=replace(conf.parallel, data=get_replicas(conf) or 1))
            question = load_question(conf, KEYS, base, PlanOptions(prices={}))
            searched = search_or_explain(
                question.profile,
                question.training,
                question.cluster,
                question.wishes,
                limit_s=LIMIT_S,
                may_have_zero_3=question.may_have_zero_3,
            )
            tables = Tables(question.profile, question.training)
            plan = build_plan(tables, question.cluster, searched.best, question.wishes.least)
    except VjobError as error:
        return None, str(error)
    return plan, ESTIMATED if question.is_estimate else f"estimated, by {question.basis}"


def fill_batch(conf: JobConf) -> JobConf:
    """With the batch that a built-in program has by default."""
    train, replicas = conf.train, get_replicas(conf) or 1
    if train.global_batch_size is not None or is_open(conf) or conf.program.kind not in BUILT_IN:
        return conf
    batch = require_number(train.micro_batch_size) * replicas
    batch *= require_number(conf.parallel.pipeline)
    return replace(conf, train=replace(train, global_batch_size=batch))


def find_step_s(
    trial: Trial, seen: Seen, plan: LayoutPlan | None, certainty: str
) -> tuple[float | None, str]:
    """Seconds of a step, and how sure that is."""
    progress = seen.snapshot.progress
    points = progress.points if progress is not None else ()
    times = [point.step_s for point in points if point.step_s is not None]
    if trial.is_whole and times:
        return statistics.median(times[1:] or times), MEASURED + FIRST_STEPS
    if plan is not None:
        return plan.step_s, certainty
    if trial.is_whole:
        return None, "too few steps were timed"
    if times and not trial.is_small:
        return statistics.median(times[1:] or times), f"{MEASURED} {trial.caveat}{FIRST_STEPS}"
    return None, f"not the whole run was tried, and {certainty.splitlines()[0]}"


def find_num_steps(conf: JobConf, seen: Seen) -> int | None:
    """Steps of the whole run; of a script those that its lines count to."""
    if conf.program.kind in BUILT_IN:
        return conf.train.steps
    progress = seen.snapshot.progress
    return None if progress is None else progress.num_steps


def tell_memory(trial: Trial, seen: Seen, plan: LayoutPlan | None, certainty: str) -> Row:
    """Memory by stage: measured where the whole run was tried, else the planner's."""
    name = "memory"
    if trial.is_whole or (plan is None and not trial.is_small):
        found = measure_memory(seen)
        if found is not None:
            sure = MEASURED if trial.is_whole else f"{MEASURED} {trial.caveat}"
            return replace(found, certainty=sure)
    if plan is None:
        why = certainty.splitlines()[0]
        return unknown(name, why if trial.is_whole else f"not the whole run was tried, and {why}")
    held, limit = plan.memory_bytes, plan.limit_bytes
    over = [n for n, (a, b) in enumerate(zip(held, limit, strict=True)) if a > b]
    words = "; ".join(
        f"stage {stage} {format_bytes(amount)} of {format_bytes(most)}"
        for stage, (amount, most) in enumerate(zip(held, limit, strict=True))
    )
    fits = f"stage {over[0]} does not fit: " if over else "fits: "
    certainty = MEMORY_MODEL if certainty == ESTIMATED else certainty
    return Row(
        name=name,
        text=fits + words,
        certainty=certainty,
        values={"fits": not over, "bytes": list(held), "limit_bytes": list(limit)},
    )


def measure_memory(seen: Seen) -> Row | None:
    """By torch's own counts of each stage, else the GPUs', else the processes'."""
    stages = {rank.rank: rank.stage for rank in seen.snapshot.ranks}
    by_rank = _read_printed(seen) or seen.rank_mb
    total_mb = min((total for _, total in seen.gpu_mb.values()), default=None)
    if seen.gpu_mb and not _read_printed(seen):
        most = max(used for used, _ in seen.gpu_mb.values())
        assert total_mb is not None
        return _tell_measured({"the fullest GPU": most}, total_mb)
    if not by_rank:
        return None
    by_stage: dict[str, float] = {}
    for rank, mb in sorted(by_rank.items(), key=lambda item: (stages.get(item[0]) or 0, item[0])):
        stage = stages.get(rank)
        key = f"rank {rank}" if stage is None else f"stage {stage}"
        by_stage[key] = max(mb, by_stage.get(key, 0.0))
    if total_mb is not None:
        return _tell_measured(by_stage, total_mb)
    return _tell_processes(by_stage, sum(by_rank.values()), seen)


def _read_printed(seen: Seen) -> dict[int, float]:
    """What ranks of a built-in program printed of their memory."""
    found: dict[int, float] = {}
    for attempt in seen.run.attempts()[-1:]:
        for node in seen.snapshot.nodes:
            for line in last_lines(attempt.node_log(node.name, "out"), NUM_LINES):
                memory = parse_memory(line.partition(": ")[2])
                if (
                    memory is not None
                    and memory.rank is not None
                    and memory.max_reserved is not None
                ):
                    found[memory.rank] = max(memory.max_reserved, found.get(memory.rank, 0.0))
    return found


def _tell_measured(held: dict[str, float], total_mb: float) -> Row:
    over = [name for name, mb in held.items() if mb > FULL * total_mb]
    words = "; ".join(f"{name} {format_bytes(mb * 2**20)}" for name, mb in held.items())
    fits = f"{over[0]} is nearly full: " if over else "fits: "
    return Row(
        name="memory",
        text=f"{fits}{words} of {format_bytes(total_mb * 2**20)}",
        certainty=MEASURED,
        values={"fits": True, "mb": held, "limit_mb": total_mb},
    )


def _tell_processes(held: dict[str, float], sum_mb: float, seen: Seen) -> Row:
    """Processes on a node's processors; its memory is shared by all of them."""
    totals = [node.memory_total_mb for node in seen.snapshot.nodes if node.memory_total_mb]
    words = "; ".join(f"{name} {format_bytes(mb * 2**20)}" for name, mb in held.items())
    node = f", {format_bytes(sum_mb * 2**20)} in all"
    node += f" of the node's {format_bytes(totals[0] * 2**20)}" if totals else ""
    return Row(
        name="memory",
        text=f"fits: {words}{node}",
        certainty=MEASURED,
        values={"fits": True, "mb": held, "limit_mb": totals[0] if totals else None},
    )


def tell_step(step_s: float | None, sure: str) -> Row:
    if step_s is None:
        return unknown("step", sure)
    return Row(name="step", text=_format_step(step_s), certainty=sure, values={"step_s": step_s})


def tell_duration(conf: JobConf, step_s: float | None, sure: str, steps: int | None) -> Row:
    """Of the whole run, beside its time limit."""
    name = "duration"
    limit_s = 60.0 * conf.cluster.walltime_min
    if step_s is None:
        return unknown(name, "for want of the step's time", steps=steps)
    if steps is None:
        return unknown(name, "the program's lines do not say how many steps it will do")
    whole_s = step_s * steps
    text = f"{format_duration(whole_s)} for {steps:,} steps"
    has_limit = conf.cluster.machine_list is None
    if has_limit:
        beside = "within" if whole_s <= limit_s else "MORE than"
        text += f", {beside} the limit of {format_duration(limit_s)}"
    return Row(
        name=name,
        text=text,
        certainty=sure,
        values={"run_s": whole_s, "steps": steps, "limit_s": limit_s if has_limit else None},
    )


def tell_cost(
    whole: Prepared, conf: JobConf, step_s: float | None, sure: str, steps: int | None
) -> Row:
    """Node-hours, GPU-hours, and what they cost where the conf has prices."""
    from vjob.jobs.planning.question import find_price

    nodes = whole.plan.num_nodes
    gpus = sum(group.count * group.num_gpus for group in conf.cluster.nodes)
    if step_s is not None and steps is not None:
        hours, basis = step_s * steps / 3600, sure
    else:
        hours, basis = conf.cluster.walltime_min / 60, "at most, by the time limit"
    parts = [f"{nodes * hours:,.3g} node-hours"]
    parts += [f"{gpus * hours:,.3g} GPU-hours"] if gpus else []
    prices = [find_price(group, group.gpu_type or "", conf.prices) for group in conf.cluster.nodes]
    price = None
    if conf.prices and None not in prices:
        each = zip(conf.cluster.nodes, prices, strict=True)
        price = hours * sum(group.count * (one or 0.0) for group, one in each)
        parts.append(f"a price of {price:,.2f}")
    return Row(
        name="cost",
        text=", ".join(parts),
        certainty=basis,
        values={"node_hours": nodes * hours, "gpu_hours": gpus * hours, "price": price},
    )


def tell_slurm_start(asked: Asked) -> Row:
    if not asked.start:
        return unknown("start", asked.why_not)
    where = f" on {asked.nodes}" if asked.nodes else ""
    return Row(
        name="start",
        text=f"{asked.start.replace('T', ' ')}{where}",
        certainty="Slurm's estimate, by the jobs that it has now",
        values={"start": asked.start, "nodes": asked.nodes},
    )


def estimate_checkpoint(conf: JobConf) -> int:
    """Bytes of a built-in program's checkpoint: weights in fp32 and two moments, one with sgd."""
    model = conf.model
    assert model is not None, "check_program refuses a conf without one"
    parameters = 12 * model.layers * model.hidden**2
    parameters += (model.vocab + model.sequence) * model.hidden
    return parameters * (8 if conf.train.optimizer.name == "sgd" else 12)


def _format_step(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def format_bytes(amount: float | None) -> str:
    """`1.5 GB`, by powers of 1024 as is usual for GPUs' memory."""
    if amount is None:
        return ""
    for unit, size in (("TB", 2**40), ("GB", 2**30), ("MB", 2**20)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount / 1024:.3g} kB"

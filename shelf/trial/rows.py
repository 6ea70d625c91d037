"""Rows of a try: how it began, and what it measured of the whole run's memory and steps.

What a smaller layout or other devices tell nothing about is `not known`: `vjob plan` estimates it.
Nothing is computed from the first steps, which warm up: the planner predicts a run's duration.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.logs.training_log import parse_memory
from vjob.jobs.errors import RefusedError, VjobError
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.submit.submit import Prepared
from vjob.shelf.trial.result import MEASURED, Row, Trouble, unknown
from vjob.shelf.trial.smaller import Trial
from vjob.shelf.trial.watch import Ending, Seen

FIRST_STEPS = ": first steps, so at most"
"""A try's steps warm up: later ones take less, often by far."""
SMALLER = "the try was smaller than the run; `vjob plan` estimates it"
NUM_LINES = 500
FULL = 0.97
"""Share of a GPU's memory that a run may fill: the driver and NCCL need the rest."""
NO_CLUSTER = ("controller", "no cluster")
"""Rows of the catalogue for refusals where no cluster answers: they say nothing about the conf."""


def find_refusal(whole: Prepared) -> Trouble | None:
    """The refusal of the whole run by Slurm itself (`sbatch --test-only`); None without one."""
    scheduler = schedulers.get_scheduler(whole.plan.scheduler)
    if not scheduler.can.test_only or scheduler.find_obstacle():
        return None
    for group, text in whole.scripts.batch.items():
        try:
            scheduler.test(whole.run, group, text)
        except RefusedError as error:
            is_silent = error.row is not None and error.row.name in NO_CLUSTER
            return None if is_silent else build_refusal(error)
        except VjobError:
            return None
    return None


def build_refusal(error: VjobError) -> Trouble:
    """Describe a submit that failed as the trouble of a try, with its cause and its remedy."""
    if not isinstance(error, RefusedError):
        head, *more = str(error).splitlines()
        return Trouble(what="submit", cause=head, remedy="; ".join(map(str.strip, more)))
    words = "; ".join(line.removeprefix("sbatch: ") for line in error.said)
    cause = f"{error.head}: {words}" if words else error.head
    return Trouble(what="submit", cause=cause, remedy=error.remedy)


def tell_start(seen: Seen, trial: Trial, troubles: Sequence[Trouble]) -> Row:
    """The row that says whether it starts."""
    name = "starts"
    where = ", ".join(node.name for node in seen.snapshot.nodes) or "no node"
    took = format_duration(seen.took_s or 0.0)
    ranks = sum(group.num_ranks for group in trial.conf.cluster.nodes)
    failed = any(trouble.what in ("starts", "submit") for trouble in troubles)
    values = {
        "starts": not failed,
        "steps": len(seen.steps),
        "seconds": seen.took_s,
        "ranks": ranks,
    }
    if failed:
        return Row(name=name, text="no", certainty=MEASURED, values=values)
    on = f"{ranks} rank{'s' if ranks > 1 else ''} on {where}"
    if seen.steps:
        num, last = len(seen.steps), seen.steps[-1]
        # A program that prints a line every 5 steps did more of them than its lines.
        count = f"{num} steps" if num > 1 and last - seen.steps[0] < num else f"step {last}"
        text = f"yes: {count} in {took}, {on}"
    elif seen.ending is Ending.OVER:
        text = f"yes: it ended well after {took} and printed no step, {on}"
    else:
        at = f"; {seen.at}" if seen.at else ""
        limit = format_duration(seen.limit_s)
        why = f"it runs, no step was seen in {limit}{at}; try a longer --limit"
        return unknown(name, why, **values)
    return Row(name=name, text=text, certainty=MEASURED, values=values)


def tell_step(trial: Trial, seen: Seen) -> Row:
    """The row that says what a step takes."""
    step_s, sure = find_step_s(trial, seen)
    if step_s is None:
        return unknown("step", sure)
    text = f"{step_s * 1000:.3g} ms" if step_s < 1 else f"{step_s:.3g} s"
    return Row(name="step", text=text, certainty=sure, values={"step_s": step_s})


def find_step_s(trial: Trial, seen: Seen) -> tuple[float | None, str]:
    """Seconds of a step, and how sure that is."""
    times = seen.step_times
    if trial.is_small:
        return None, SMALLER
    if not times:
        return None, "too few steps were timed"
    sure = MEASURED if trial.is_whole else f"{MEASURED} {trial.caveat}"
    return statistics.median(times[1:] or times), sure + FIRST_STEPS


def tell_memory(trial: Trial, seen: Seen) -> Row:
    """Memory by torch's own counts of each stage, else that in use on the fullest GPU."""
    limit_mb = min((total for _, total in seen.gpu_mb.values()), default=None)
    if trial.is_small or limit_mb is None:
        return unknown("memory", SMALLER if trial.is_small else "no GPU was sampled")
    held = _read_printed(seen)
    held = held or {"the fullest GPU": max(used for used, _ in seen.gpu_mb.values())}
    over = [name for name, mb in held.items() if mb > FULL * limit_mb]
    words = "; ".join(f"{name} {format_bytes(mb * 2**20)}" for name, mb in held.items())
    fits = f"{over[0]} is nearly full: " if over else "fits: "
    return Row(
        name="memory",
        text=f"{fits}{words} of {format_bytes(limit_mb * 2**20)}",
        certainty=MEASURED if trial.is_whole else f"{MEASURED} {trial.caveat}",
        values={"fits": True, "mb": held, "limit_mb": limit_mb},
    )


def _read_printed(seen: Seen) -> dict[str, float]:
    """Most MB of each stage, as ranks of a built-in program printed them."""
    stages = {rank.rank: rank.stage for rank in seen.snapshot.ranks}
    found: dict[int, float] = {}
    for attempt in seen.run.attempts()[-1:]:
        for node in seen.snapshot.nodes:
            for line in last_lines(attempt.node_log(node.name, "out"), NUM_LINES):
                memory = parse_memory(line.partition(": ")[2])
                if memory is None or memory.rank is None or memory.max_reserved is None:
                    continue
                stage = stages.get(memory.rank) or 0
                found[stage] = max(memory.max_reserved, found.get(stage, 0.0))
    return {f"stage {stage}": mb for stage, mb in sorted(found.items())}


def format_bytes(amount: float) -> str:
    """`1.5 GB`, by powers of 1024 as is usual for GPUs' memory."""
    for unit, size in (("TB", 2**40), ("GB", 2**30), ("MB", 2**20)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount / 1024:.3g} kB"

"""Judge a try: find what would stop the whole run, and what it has shown. Pure but for the
checkpoint folder.

The rules of `vjob status` (jobs/monitor/rules) decide, and their findings are quoted. Only the try
itself can tell that ranks hang before their first step, or that a program does not end after its
last.
"""

from __future__ import annotations

from dataclasses import replace

from varuna_core.facts.catalogue.rank_output import ATTEMPT_ENDED, REFUSED_BY_VJOB
from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Action
from varuna_core.records.checkpoints import find_newest
from varuna_core.records.formatting import format_duration, format_size, join_numbers
from vjob.jobs.errors import RefusedError, VjobError
from vjob.jobs.monitor.model.snapshot import Health, Point, Verdict
from vjob.jobs.monitor.rules.base import find_bad_loss
from vjob.jobs.monitor.rules.words import render_advice
from vjob.shelf.trial.folder import CheckpointFolder
from vjob.shelf.trial.result import Result, Row, Trouble
from vjob.shelf.trial.smaller import STEPS, Trial
from vjob.shelf.trial.watch import TryObservation

NUM_EVIDENCE = 3
ECHOES = (ATTEMPT_ENDED, REFUSED_BY_VJOB)
"""Known lines that repeat how the attempt ended."""
ON_GOING = (Action.CANCEL, Action.WAIT)
"""Remedies that only make sense while a run continues; a try is over."""
FULL = 0.97
"""Share of a GPU's memory that a run may fill: the driver and NCCL need the rest."""
CHECKPOINT, MEMORY = "checkpoint", "memory"


def judge_try(
    seen: TryObservation, trial: Trial, folder: CheckpointFolder | None, result: Result
) -> None:
    """Add to the result the cause that would stop the whole run, and a row for each answer."""
    trouble = find_trouble(seen)
    result.stacks = seen.stacks
    result.findings += [trouble] if trouble is not None else []
    result.rows.append(describe_start(seen, trial, has_failed=trouble is not None))
    if not result.is_healthy:
        return
    saved = describe_checkpoint(trial, folder)
    if isinstance(saved, Trouble):
        result.findings.append(saved)
    else:
        result.rows.append(saved)
    result.rows.append(describe_memory(trial, seen))


def find_trouble(seen: TryObservation) -> Trouble | None:
    """Return the cause that would stop the whole run; None if no problem is known."""
    verdict = seen.verdict
    if verdict.health is Health.DONE:
        progress = seen.snapshot.progress
        bad = find_bad_loss(progress.points) if progress is not None else None
        return None if bad is None else _blame_loss(bad)
    if seen.is_over or verdict.never_starts or verdict.health is Health.FAILING:
        return _quote(verdict)
    if seen.is_enough:
        return None
    if seen.is_hanging:
        return _describe_hang(seen)
    if verdict.health is Health.STALLED:
        return _quote(verdict)
    if len(seen.steps) >= STEPS:
        limit = format_duration(seen.limit_s)
        cause = f"the program finished its {STEPS} steps but had not exited {limit} later"
        return Trouble(rule="no end", cause=cause, remedy="give a longer --limit")
    return None


def _blame_loss(bad: Point) -> Trouble:
    """Describe the last loss of a program that ended well."""
    return Trouble(
        rule="not a number",
        end=EndCause.NOT_A_NUMBER,
        cause=f"the loss is {'nan' if bad.loss is None else bad.loss} in step {bad.step}",
        remedy="look at the first batch and the initial weights",
    )


def _quote(verdict: Verdict) -> Trouble:
    """Quote the verdict's finding, with the remedies that a run has which is over."""
    main = verdict.main
    remedies = tuple(one for one in main.remedies if one.action not in ON_GOING)
    # The sentence rests on the first one.
    lines = [line.text for line in verdict.evidence[1:] if line.kind not in ECHOES]
    return Trouble(
        rule=main.rule,
        end=main.cause,
        cause=verdict.reason,
        remedy=render_advice(replace(main, remedies=remedies), verdict.context, verdict.job),
        evidence=tuple(lines[:NUM_EVIDENCE]),
    )


def _describe_hang(seen: TryObservation) -> Trouble:
    gone = [rank.rank for rank in seen.snapshot.ranks if rank.exit is not None]
    ended = f"; ended {'is rank' if len(gone) == 1 else 'are ranks'} {join_numbers(gone)}"
    limit = format_duration(seen.limit_s)
    return Trouble(
        rule="hang",
        end=EndCause.HANG,
        cause=f"no step in {limit}, and ranks wait: none uses its processor{ended if gone else ''}",
        remedy="see that all ranks read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the "
        "environment and make the same calls: they wait for a call that never comes",
        evidence=tuple(line.text for line in seen.snapshot.errors[:NUM_EVIDENCE]),
    )


def quote_error(error: VjobError) -> Trouble:
    """Describe an error of a submit as the trouble of a try, with its cause and its remedy."""
    if not isinstance(error, RefusedError):
        head, *more = str(error).splitlines()
        return Trouble(cause=head, remedy="\n".join(map(str.strip, more)))
    words = "; ".join(line.removeprefix("sbatch: ") for line in error.said)
    cause = f"{error.head}: {words}" if words else error.head
    return Trouble(cause=cause, remedy=error.remedy)


def describe_start(seen: TryObservation, trial: Trial, *, has_failed: bool) -> Row:
    """Return the row on the start of the program."""
    took = format_duration(seen.took_s or 0.0)
    where = ", ".join(node.name for node in seen.snapshot.nodes) or "no node"
    ranks = sum(group.num_ranks for group in trial.conf.cluster.nodes)
    on = f"{ranks} rank{'s' if ranks > 1 else ''} on {where}"
    if seen.steps:
        num, last = len(seen.steps), seen.steps[-1]
        # A program that prints a line every 5 steps did more of them than its lines.
        count = f"{num} steps" if num > 1 and last - seen.steps[0] < num else f"step {last}"
        text = f"yes: {count} in {took}, {on}"
    elif has_failed:
        text = "no"
    elif seen.is_over:
        text = f"yes: the program ended well after {took} and printed no step, {on}"
    else:
        limit = format_duration(seen.limit_s)
        text = f"not known: the program runs, but no step was seen in {limit}; try a longer --limit"
    values = {
        "starts": bool(seen.steps) or not has_failed,
        "steps": len(seen.steps),
        "last_step": seen.steps[-1] if seen.steps else None,
        "seconds": seen.took_s,
        "ranks": ranks,
    }
    return Row(name="starts", text=text, values=values)


def describe_checkpoint(trial: Trial, folder: CheckpointFolder | None) -> Row | Trouble:
    """Return the row on checkpoints, or a problem if a built-in program saved none."""
    if folder is None:
        return Row(name=CHECKPOINT, text="not known: train.checkpoint.folder is not set")
    if folder.here is None:
        return Row(name=CHECKPOINT, text=f"not known: this machine does not see {folder.asked}")
    sizes = [file.stat().st_size for file in folder.here.rglob("*") if file.is_file()]
    # A script may save in a format of its own: the folder is the try's alone.
    is_saved = find_newest(folder.here) is not None or (not trial.is_built_in and sum(sizes) > 0)
    if not is_saved and trial.is_built_in:
        cause = f"the program ended well, but no checkpoint is in {folder.asked}"
        return Trouble(rule="not saved", cause=cause)
    size = sum(sizes) if is_saved and not (trial.is_small and trial.is_built_in) else None
    text = "saved" if is_saved else "the folder can be written; no checkpoint was saved yet"
    text += f", {format_size(size)}" if size is not None else ""
    values = {"folder": folder.asked, "saved": is_saved, "bytes": size}
    return Row(name=CHECKPOINT, text=text, values=values)


def describe_memory(trial: Trial, seen: TryObservation) -> Row:
    """Return the row on the memory in use on the fullest GPU."""
    if trial.is_small:
        why = "the try was smaller than the run; `vjob plan` estimates it"
        return Row(name=MEMORY, text=f"not known: {why}")
    if not seen.gpu_mb:
        why = seen.gpus_not_known or "no GPU was sampled"
        return Row(name=MEMORY, text=f"not known: {why}")
    used, total = max(seen.gpu_mb.values(), key=lambda pair: pair[0] / pair[1])
    fits = "nearly full" if used > FULL * total else "fits"
    sizes = f"{format_size(round(used * 2**20))} of {format_size(round(total * 2**20))}"
    text = f"{fits}: {sizes} on the fullest GPU"
    return Row(name=MEMORY, text=text, values={"fits": True, "mb": used, "limit_mb": total})

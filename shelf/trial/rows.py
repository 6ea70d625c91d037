"""Rows of a try's result: its start, its checkpoint, and the memory of its GPUs.

A value is `not known` if a smaller layout or other devices say nothing about the whole run; `vjob
plan` can estimate it.
"""

from __future__ import annotations

from varuna_core.records.checkpoints import find_newest
from varuna_core.records.formatting import format_duration, format_size
from vjob.jobs.conf.schema import BUILT_IN
from vjob.jobs.errors import RefusedError, VjobError
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.submit.submit import Prepared
from vjob.shelf.trial.folder import NAME, CheckpointFolder
from vjob.shelf.trial.result import MEASURED, Row, Trouble, unknown
from vjob.shelf.trial.smaller import Trial
from vjob.shelf.trial.watch import Ending, TryObservation

SMALLER = "the try was smaller than the run; `vjob plan` estimates it"
FULL = 0.97
"""Share of a GPU's memory that a run may fill: the driver and NCCL need the rest."""
NO_CLUSTER = ("controller", "no cluster")
"""Rows of the catalogue for refusals without a reachable cluster, which say nothing about the
conf."""


def find_refusal(whole: Prepared) -> Trouble | None:
    """Ask Slurm to check the whole run (`sbatch --test-only`); return its refusal, or None."""
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
        return Trouble(what="submit", cause=head, remedy="\n".join(map(str.strip, more)))
    words = "; ".join(line.removeprefix("sbatch: ") for line in error.said)
    cause = f"{error.head}: {words}" if words else error.head
    return Trouble(what="submit", cause=cause, remedy=error.remedy)


def describe_start(seen: TryObservation, trial: Trial, trouble: Trouble | None) -> Row:
    """Return the row on the start of the program."""
    name, took = "starts", format_duration(seen.took_s or 0.0)
    where = ", ".join(node.name for node in seen.snapshot.nodes) or "no node"
    ranks = sum(group.num_ranks for group in trial.conf.cluster.nodes)
    failed = trouble is not None and trouble.what in ("starts", "submit")
    values = {
        "starts": not failed,
        "steps": len(seen.steps),
        "last_step": seen.steps[-1] if seen.steps else None,
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
        limit = format_duration(seen.limit_s)
        why = f"it runs, no step was seen in {limit}; try a longer --limit"
        return unknown(name, why, **values)
    return Row(name=name, text=text, certainty=MEASURED, values=values)


def describe_checkpoint(
    trial: Trial, folder: CheckpointFolder | None
) -> tuple[Row, Trouble | None]:
    """Return the row on checkpoints, and a problem if a built-in program saved none."""
    is_built_in = trial.conf.program.kind in BUILT_IN
    if folder is None:
        whose = "so none is saved" if is_built_in else "and the program's own is not known"
        return unknown(NAME, f"train.checkpoint.folder is not set, {whose}"), None
    if folder.here is None:
        return unknown(NAME, f"this machine does not see {folder.asked}"), None
    free, room = folder.free_bytes, ""
    if free is not None:
        room = f", {format_size(free)} free"
    # A script may save in a format of its own: the folder is the try's alone.
    is_saved = find_newest(folder.here) is not None or (not is_built_in and folder.measure() > 0)
    if not is_saved and is_built_in:
        cause = f"it ended well and no checkpoint is in {folder.asked}"
        return unknown(NAME, "none was saved"), Trouble(what=NAME, rule="not saved", cause=cause)
    size = folder.measure() if is_saved and not (trial.is_small and is_built_in) else None
    text = "saved" if is_saved else "the folder can be written; none was saved yet"
    text += f", {format_size(size)}" if size is not None else ""
    values = {"folder": folder.asked, "free_bytes": free, "saved": is_saved, "bytes": size}
    return Row(name=NAME, text=text + room, certainty=MEASURED, values=values), None


def describe_memory(trial: Trial, seen: TryObservation) -> Row:
    """Return the row on the memory in use on the fullest GPU."""
    if trial.is_small or not seen.gpu_mb:
        why = seen.gpus_not_known or "no GPU was sampled"
        return unknown("memory", SMALLER if trial.is_small else why)
    used, total = max(seen.gpu_mb.values(), key=lambda pair: pair[0] / pair[1])
    fits = "nearly full" if used > FULL * total else "fits"
    sizes = f"{format_size(round(used * 2**20))} of {format_size(round(total * 2**20))}"
    return Row(
        name="memory",
        text=f"{fits}: {sizes} on the fullest GPU",
        certainty=trial.certainty,
        values={"fits": True, "mb": used, "limit_mb": total},
    )

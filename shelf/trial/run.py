"""Try a conf: submit a small version as an ordinary run, watch it, and judge it.

    ask Slurm about the whole run ─► shrink ─► submit ─► watch ─► judge

Files of a try are removed once its run is over: its checkpoints always, its run folder if nothing
was found.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from varuna_core.agent.gpu.accelerator import choose_accelerator, count_visible
from varuna_core.facts.known import Value
from varuna_core.records.record import INTENT, read_record, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.schema import BUILT_IN, JobConf
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.interrupts import defer_interrupts
from vjob.jobs.planning.question import find_nodes
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import is_over, view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.submit.submit import prepare, submit
from vjob.shelf.trial.folder import CheckpointFolder, make_folder
from vjob.shelf.trial.judgement import judge_try
from vjob.shelf.trial.result import Result, Row, Trouble
from vjob.shelf.trial.rows import (
    build_refusal,
    describe_checkpoint,
    describe_memory,
    describe_start,
    find_refusal,
)
from vjob.shelf.trial.smaller import OneNode, Trial, keep_launch, shrink
from vjob.shelf.trial.watch import Ending, Say, TryObservation, watch

log = logging.getLogger(__name__)
CANCEL_S = 60


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one try."""

    queue: str | None = None
    is_here: bool = False
    limit_s: float = 120.0
    keeps: bool = False
    """Keep the run folder even if nothing was found."""


def run_trial(resolved: Resolved, options: Options, say: Say) -> Result:
    """Try a conf; raise InputError if the conf cannot be submitted at all."""
    trying = _Trying(resolved, options, say)
    is_kept = False
    try:
        trying.run()
        is_kept = bool(trying.troubles) or options.keeps
    finally:
        trying.clean_up(keeps=is_kept)
    return trying.build_result(is_kept=is_kept)


def choose_node(conf: JobConf, queue: str | None, *, is_here: bool) -> OneNode:
    """Return the node for a try of this conf; raise InputError if there is none.

    The node is one of `queue`, or of the first group's own queue; this machine without Slurm, or
    with `is_here`.
    """
    first = conf.cluster.nodes[0]
    wants_gpus = any(group.num_gpus for group in conf.cluster.nodes)
    if queue is not None and not schedulers.choose_auto(new_job=True).can.has_queue:
        raise InputError(
            f"--queue {queue}: sbatch is not on PATH; leave --queue out to try it on this machine"
        )
    own = schedulers.choose_for(conf.cluster)
    is_queued = (own.can.has_queue or own.can.inside_job) and not own.find_obstacle()
    if is_here or (queue is None and not is_queued):
        counted = count_visible(choose_accelerator(), os.environ)
        count = counted.value if wants_gpus and isinstance(counted, Value) else 0
        kind = f"{first.gpu_type}:" if first.gpu_type else ""
        return OneNode(num_gpus=count, gpus=f"{kind}{count}" if count else None, is_here=True)
    node = OneNode(
        num_gpus=first.num_gpus,
        gpus=first.gpus,
        queue=queue or first.queue,
        is_here=False,
        is_asked=queue is not None,
    )
    if queue is None or queue == first.queue or not wants_gpus:
        return node
    try:
        groups = find_nodes(queue)
    except InputError:  # none with GPUs
        return replace(node, num_gpus=0, gpus=None)
    # GPUs of the kind that the conf has, where the queue has such; else of the most.
    alike = [group for group in groups if first.gpu_type in (None, group.gpu_type)]
    best = max(alike or groups, key=lambda group: group.num_gpus)
    if best.num_gpus >= first.num_gpus and alike:
        return node
    return replace(node, num_gpus=best.num_gpus, gpus=best.gpus)


class _Trying:
    """State of one try."""

    def __init__(self, resolved: Resolved, options: Options, say: Say) -> None:
        self.resolved, self.options, self.say = resolved, options, say
        self.conf = resolved.conf
        self.begun = time.monotonic()
        self.submitted: RunFolder | None = None
        self.troubles: list[Trouble] = []
        self.rows: list[Row] = []
        self.stacks: tuple[str, ...] = ()
        self.trial: Trial | None = None
        self.folder: CheckpointFolder | None = None
        self.goes_on = False
        """True if the run could not be ended."""

    def run(self) -> None:
        """Do all steps, until a finding makes the next one useless."""
        options = self.options
        node = choose_node(self.conf, options.queue, is_here=options.is_here)
        whole = prepare(self.resolved, for_preview=shutil.which("sbatch") is None)
        self._note(find_refusal(whole))
        if self.troubles and not node.is_here and not node.is_asked:
            return  # the try would be refused like it
        folder = self.folder = make_folder(self.conf, self.resolved.path.parent)
        problem = folder.problem if folder is not None else None
        self._note(problem)
        self.trial = shrink(
            keep_launch(self.conf, whole.plan.launch),
            node,
            limit_min=math.ceil(options.limit_s / 60),
            checkpoint=folder.seen if folder is not None and problem is None else None,
        )
        seen = self._start(self.trial.conf)
        if seen is None:
            return
        self.stacks, trouble = seen.stacks, judge_try(seen)
        self._note(trouble)
        self.rows.append(describe_start(seen, self.trial, trouble))
        if not self.troubles:
            row, trouble = describe_checkpoint(self.trial, folder)
            self.rows.append(row)
            self._note(trouble)
        self.rows.append(describe_memory(self.trial, seen))

    def _note(self, trouble: Trouble | None) -> None:
        self.troubles += [trouble] if trouble is not None else []

    def _start(self, conf: JobConf) -> TryObservation | None:
        """Submit, watch and end the run; if the submit fails, add a finding and return None."""
        chosen = replace(self.resolved.chosen, conf=conf, prediction=None, layouts=None)
        chosen = replace(chosen, layout_steps=None)
        try:
            with defer_interrupts():
                # Listed before its job exists: that must be ended, whatever becomes of the submit.
                run, _ = submit(replace(self.resolved, chosen=chosen), fill=self._hold)
        except InputError:
            raise
        except VjobError as error:
            self._note(build_refusal(error))
            return None
        is_built_in = conf.program.kind in BUILT_IN
        limit_s, say = self.options.limit_s, self.say
        seen = watch(run, ends_itself=is_built_in, limit_s=limit_s, say=say)
        if seen.ending is not Ending.OVER:
            say("ending it")
            saves = seen.ending is Ending.STEPS and conf.train.checkpoint.folder is not None
            stop(run, saves=saves)
        return seen

    def _hold(self, run: RunFolder) -> None:
        self.submitted = run

    def build_result(self, *, is_kept: bool) -> Result:
        notes = () if self.trial is None else self.trial.notes
        if self.folder is not None and self.folder.here is None and self.submitted is not None:
            left = f"its checkpoints stay in {self.folder.seen}, which this machine does not see"
            notes = (*notes, left)
        is_there = self.submitted is not None and (is_kept or self.goes_on)
        return Result(
            conf=str(self.resolved.path),
            rows=tuple(self.rows),
            findings=tuple(self.troubles),
            differs=notes,
            stacks=self.stacks,
            took_s=time.monotonic() - self.begun,
            files=str(self.submitted.path) if self.submitted is not None and is_there else "",
        )

    def clean_up(self, *, keeps: bool) -> None:
        """End the run if it is not over, and remove its files; if it cannot be ended, keep all
        files."""
        ignore_signals()
        run = self.submitted
        if run is not None:
            end_submit(run)
            stop(run)
            self.goes_on = not has_ended(run)
            if self.goes_on:
                log.warning("the try may go on, and is kept: vjob cancel %s", run.path)
            elif not keeps:
                remove(run)
        if self.folder is not None and not self.goes_on:
            self.folder.remove()


def ignore_signals() -> None:
    """Ignore signals that would end the command before it has cleaned up."""
    with suppress(ValueError):  # not the main thread, which alone gets signals
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def stop(run: RunFolder, *, saves: bool = False) -> None:
    """End a run that is not over; with `saves`, ask its ranks to save first."""
    try:
        cancel_run(run, now=not saves, wait_s=CANCEL_S, say=lambda text: None)
    except VjobError as error:
        log.info("%s", error)


def end_submit(run: RunFolder) -> None:
    """Record that the submit has ended, so that a job that it may have started is looked for."""
    record = read_record(run)
    if record is not None and record.state == INTENT:
        with suppress(OSError):
            write_record(run, replace(record, pid_start=None))


def has_ended(run: RunFolder) -> bool:
    """Return True if the run is over, or was never written."""
    try:
        return not run.path.exists() or is_over(view_run(run))
    except VjobError:
        return False


def remove(run: RunFolder) -> None:
    """Remove the folder of a run that is over, and the links to it."""
    record = read_record(run)
    shutil.rmtree(run.path, ignore_errors=True)
    names = [] if record is None else [record.name, *(job.id for job in record.jobs)]
    for link in (run.path.with_name(name) for name in names):
        with suppress(OSError):
            if os.readlink(link) == run.name:
                link.unlink()

"""Try a conf: submit a small version as an ordinary run, watch it, and judge it.

    shrink ─► submit ─► watch ─► judge

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
from dataclasses import replace

from varuna_core.agent.gpu.accelerator import choose_accelerator, count_visible
from varuna_core.facts.known import Value
from varuna_core.records.record import INTENT, read_record, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.schema import Cluster, JobConf, NodeGroup, spell_gpus
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.interrupts import defer_interrupts
from vjob.jobs.planning.question import find_nodes
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.programs.start import describe_launch
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import is_over, view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.submit.submit import submit
from vjob.shelf.trial.folder import CheckpointFolder, make_folder
from vjob.shelf.trial.judgement import judge_try, quote_error
from vjob.shelf.trial.result import Result
from vjob.shelf.trial.smaller import Trial, keep_launch, shrink
from vjob.shelf.trial.watch import Say, TryObservation, watch

log = logging.getLogger(__name__)
CANCEL_S = 60


def choose_node(conf: JobConf, queue: str | None, *, is_here: bool) -> Cluster:
    """Return the conf's cluster with the one node of a try; raise InputError if there is none.

    The node is one of `queue`, or of the first group's own queue; this machine without Slurm, or
    with `is_here`.
    """
    cluster, node = conf.cluster, conf.cluster.nodes[0]
    wants_gpus = any(group.num_gpus for group in cluster.nodes)
    if queue is not None and not schedulers.choose_auto(new_job=True).can.has_queue:
        raise InputError(
            f"--queue {queue}: sbatch is not on PATH; leave --queue out to try it on this machine"
        )
    own = schedulers.choose_for(cluster)
    is_queued = (own.can.has_queue or own.can.inside_job) and not own.find_obstacle()
    if is_here or (queue is None and not is_queued):
        counted = count_visible(choose_accelerator(), os.environ)
        count = counted.value if wants_gpus and isinstance(counted, Value) else 0
        node = replace(node, queue=None, gpus=spell_gpus(node.gpu_type, count), sbatch={})
        return replace(cluster, nodes=(node,), scheduler=schedulers.LOCAL)
    if queue is not None:
        gpus = _choose_gpus(node, queue) if wants_gpus and queue != node.queue else node.gpus
        node = replace(node, queue=queue, gpus=gpus, interface="auto")
    chosen = own if own.can.has_queue else schedulers.choose_auto()
    return replace(cluster, nodes=(node,), scheduler=chosen.name)


def _choose_gpus(first: NodeGroup, queue: str) -> str | int | None:
    """Return the GPUs of a node of the queue: of the conf's GPU type if the queue has such nodes,
    else the most that a node has."""
    try:
        groups = find_nodes(queue)
    except InputError:  # none with GPUs
        return None
    alike = [group for group in groups if first.gpu_type in (None, group.gpu_type)]
    best = max(alike or groups, key=lambda group: group.num_gpus)
    return first.gpus if alike and best.num_gpus >= first.num_gpus else best.gpus


class Try:
    """One try of a conf; `run` raises InputError if the conf cannot be submitted at all."""

    def __init__(self, resolved: Resolved, *, limit_s: float, keeps: bool, say: Say) -> None:
        """With `keeps`, the run folder is kept even if nothing was found."""
        self.resolved, self.limit_s, self.keeps, self.say = resolved, limit_s, keeps, say
        self.result = Result(conf=str(resolved.path))
        self.made: list[RunFolder] = []
        self.folder: CheckpointFolder | None = None

    def run(self, cluster: Cluster) -> Result:
        """Try the conf on the node of this cluster, and remove what need not stay."""
        begun, result, is_kept = time.monotonic(), self.result, False
        try:
            self._try(cluster)
            is_kept = self.keeps or not result.is_healthy
        finally:
            is_kept = self._clean_up(keeps=is_kept)
        result.took_s = time.monotonic() - begun
        result.files = str(self.made[0].path) if self.made and is_kept else ""
        return result

    def _try(self, cluster: Cluster) -> None:
        conf, result = self.resolved.conf, self.result
        launch = describe_launch(conf, self.resolved.written).name
        try:
            self.folder = make_folder(conf, self.resolved.path.parent)
        except VjobError as error:
            result.findings.append(quote_error(error))
        trial = shrink(
            keep_launch(conf, launch),
            cluster,
            limit_min=math.ceil(self.limit_s / 60),
            checkpoint=None if self.folder is None else self.folder.seen,
        )
        result.differs += trial.notes
        if self.folder is not None and self.folder.here is None:
            left = f"checkpoints stay in {self.folder.seen}, which this machine does not see"
            result.differs.append(left)
        try:
            judge_try(self._observe(trial), trial, self.folder, result)
        except InputError:
            raise
        except VjobError as error:
            result.findings.append(quote_error(error))

    def _observe(self, trial: Trial) -> TryObservation:
        """Submit the small conf, watch its run and end it."""
        chosen = replace(self.resolved.chosen, conf=trial.conf, prediction=None, layouts=None)
        chosen = replace(chosen, layout_steps=None)
        with defer_interrupts():
            # Listed before its job exists: that must be ended, whatever becomes of the submit.
            run, _ = submit(replace(self.resolved, chosen=chosen), fill=self.made.append)
        seen = watch(run, ends_itself=trial.is_built_in, limit_s=self.limit_s, say=self.say)
        if not seen.is_over:
            self.say("ending it")
            stop(run, saves=seen.is_enough and self.folder is not None)
        return seen

    def _clean_up(self, *, keeps: bool) -> bool:
        """End the run if it is not over, and remove its files; return True if its folder stays, as
        that of a run which could not be ended does."""
        ignore_signals()
        goes_on = False
        for run in self.made:
            end_submit(run)
            stop(run)
            goes_on = not has_ended(run)
            if goes_on:
                log.warning(
                    "the run of the try may go on, so its folder is kept: vjob cancel %s", run.path
                )
            elif not keeps:
                remove(run)
        if self.folder is not None and not goes_on:
            self.folder.remove()
        return keeps or goes_on


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

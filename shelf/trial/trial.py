"""A try of a conf, from its start to its result.

    ask Slurm of the whole run ─► shrink ─► submit ─► watch ─► again, from its checkpoint ─► outlook

What a try leaves is removed once its runs are over: its checkpoints always, its run folder where
nothing was found.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from varuna_core.records.record import INTENT, read_record, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.schema import BUILT_IN, JobConf
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.runs.find import is_over, view_run
from vjob.jobs.submit.submit import defer_interrupts, prepare, submit
from vjob.shelf.trial.judgement import find_trouble, tell_start
from vjob.shelf.trial.outlook import ask_slurm, build_refusal, find_outlook
from vjob.shelf.trial.place import CheckpointFolder, choose_node, make_checkpoints
from vjob.shelf.trial.result import Finding, Result, Row
from vjob.shelf.trial.saving import SavingTrial
from vjob.shelf.trial.smaller import STEPS, Trial, shrink
from vjob.shelf.trial.watching import Ending, Say, Seen, Watcher, stop

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of one try."""

    queue: str | None = None
    is_here: bool = False
    limit_s: float = 120.0
    keeps: bool = False
    """Keep the run folder of a healthy try too."""


def run_trial(resolved: Resolved, options: Options, say: Say) -> Result:
    """Try a conf; InputError where it could not even be submitted."""
    trying = _Trying(resolved, options, say)
    is_kept = False
    try:
        trying.run()
        is_kept = bool(trying.findings) or options.keeps
    finally:
        trying.clean_up(keeps=is_kept)
    return trying.build_result(is_kept=is_kept)


class _Trying:
    """One try, as far as it has come."""

    def __init__(self, resolved: Resolved, options: Options, say: Say) -> None:
        self.resolved, self.options, self.say = resolved, options, say
        self.conf = resolved.conf
        self.begun = time.monotonic()
        self.runs: list[RunFolder] = []
        self.findings: list[Finding] = []
        self.rows: list[Row] = []
        self.trial: Trial | None = None
        self.folder: CheckpointFolder | None = None
        self.going: list[RunFolder] = []
        """Runs that could not be ended."""

    def run(self) -> None:
        """All steps, as long as nothing is found that makes the next one useless."""
        options = self.options
        node = choose_node(self.conf, options.queue, is_here=options.is_here)
        whole = prepare(self.resolved, for_preview=shutil.which("sbatch") is None)
        asked = ask_slurm(whole)
        if asked.refusal is not None:
            self.findings.append(asked.refusal)
            if not node.is_here and not node.is_asked:
                return  # the try would be refused like it
        folder = self.folder = make_checkpoints(self.conf, self.resolved.path.parent)
        is_able = folder is not None and folder.problem is None
        if folder is not None and folder.problem is not None:
            self.findings.append(folder.problem)
        self.trial = shrink(
            self.conf,
            node,
            limit_min=math.ceil(options.limit_s / 60),
            checkpoint=folder.seen if folder is not None and is_able else None,
        )
        seen = self._start(self.trial.conf, STEPS)
        if seen is None:
            return
        self.findings += find_trouble(seen, options.limit_s)
        self.rows.append(tell_start(seen, self.trial, self.findings, options.limit_s))
        if not self.findings:
            tried = SavingTrial(self.conf, self.trial, folder, options.limit_s)
            self.rows.append(tried.run(self._start))
            self.findings += tried.findings
        self.rows += find_outlook(whole, self.resolved, self.trial, seen, asked)

    def _start(self, conf: JobConf, num_steps: int) -> Seen | None:
        """Submit, watch and end; None with a finding where it could not be submitted."""
        chosen = replace(self.resolved.chosen, conf=conf, prediction=None, layouts=None)
        chosen = replace(chosen, layout_steps=None)
        try:
            with defer_interrupts():
                # Listed before its job exists: that must be ended, whatever becomes of the submit.
                run, _ = submit(replace(self.resolved, chosen=chosen), fill=self.runs.append)
        except InputError:
            raise
        except VjobError as error:
            self.findings.append(build_refusal(error))
            return None
        watcher = Watcher(run, limit_s=self.options.limit_s, say=self.say)
        seen = watcher.watch(num_steps=num_steps, ends_itself=conf.program.kind in BUILT_IN)
        if seen.ending is not Ending.OVER:
            self.say("ending it")
            saves = seen.ending is Ending.STEPS and conf.train.checkpoint.folder is not None
            stop(run, saves=saves)
        return seen

    def build_result(self, *, is_kept: bool) -> Result:
        kept = [*self.going, *(self.runs[-1:] if is_kept else [])]
        return Result(
            conf=str(self.resolved.path),
            rows=tuple(self.rows),
            findings=tuple(self.findings),
            differs=self._list_differences(),
            took_s=time.monotonic() - self.begun,
            files=" ".join(dict.fromkeys(str(run.path) for run in kept)),
        )

    def _list_differences(self) -> tuple[str, ...]:
        """The trial's notes, and the checkpoints of it that are left."""
        notes = () if self.trial is None else self.trial.notes
        folder = self.folder
        if folder is None or folder.here is not None or not self.runs:
            return notes
        left = f"its checkpoints stay in {folder.seen}, which this machine does not see"
        return (*notes, left)

    def clean_up(self, *, keeps: bool) -> None:
        """End what goes on, and remove what it left; of a run that does not end all is kept."""
        with ignore_signals():
            for run in self.runs:
                end_submit(run)
                stop(run)
            self.going = [run for run in self.runs if not has_ended(run)]
            for run in self.going:
                log.warning("the try may go on, and is kept: vjob cancel %s", run.path)
            if self.folder is not None and not self.going:
                self.folder.remove()
            for run in self.runs:
                if not keeps and run not in self.going:
                    remove(run)


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Nothing that ends a command ends the block; who asks has what is asked for already."""
    old: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            old[number] = signal.signal(number, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def end_submit(run: RunFolder) -> None:
    """Record that nobody submits the run any more, so that a job it may have is looked for."""
    record = read_record(run)
    if record is not None and record.state == INTENT:
        with suppress(OSError):
            write_record(run, replace(record, pid_start=None))


def has_ended(run: RunFolder) -> bool:
    """True where nothing of it goes on, or it was never written."""
    try:
        return not run.path.exists() or is_over(view_run(run))
    except VjobError:
        return False


def remove(run: RunFolder) -> None:
    """Remove a run that is over, with the links to it."""
    record = read_record(run)
    shutil.rmtree(run.path, ignore_errors=True)
    names = [] if record is None else [record.name, *(job.id for job in record.jobs)]
    for link in (run.path.with_name(name) for name in names):
        with suppress(OSError):
            if os.readlink(link) == run.name:
                link.unlink()

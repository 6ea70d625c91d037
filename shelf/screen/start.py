"""Entry point of the live screen: connects it to the reader of a job and to `vjob`'s commands.

Imports nothing of Textual until the screen is shown.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.log_lines.errors import classify_line, find_row
from vjob.jobs.monitor.model.snapshot import Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader
from vjob.jobs.monitor.rules.base import is_plain_job, name_job
from vjob.jobs.process import build_own_command, run
from vjob.shelf.screen.log_files import LogFiles

STREAMS = ("stdin", "stdout", "stderr")
"""Keys come from the first; Textual draws on the last."""


def can_show(environ: Mapping[str, str]) -> bool:
    """True where all streams are a terminal that moves its cursor, and Textual is installed."""
    if environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    streams = [getattr(sys, name) for name in STREAMS]
    are_terminals = all(stream is not None and stream.isatty() for stream in streams)
    return are_terminals and importlib.util.find_spec("textual") is not None


CANCEL_S = 60
REPORT_S, STACKS_S = 1800, 120


def show(job: str, here: Path, interval_s: float) -> int:
    """Show the screen until it is left; returns the exit code of the last verdict.

    InputError for what is no job.
    """
    from vjob.shelf.screen.app import run_screen  # late: Textual takes long to import

    reader = open_reader(job, here)
    source = JudgedSource(JudgedReader(reader), getattr(reader, "find_logs", dict))
    return run_screen(source, JobActions(source), interval_s=interval_s)


def show_runs(here: Path, interval_s: float) -> int:
    """Show the list of all runs, and the screen of each that is opened, until the list is left."""
    from vjob.jobs.monitor.readers.run_table import RunTable
    from vjob.shelf.screen.run_list import ListPlace, run_list  # late, as above

    table, place = RunTable(warn=False), ListPlace()
    while True:
        folder = run_list(table, ListActions(), place, interval_s=interval_s)
        if folder is None:
            return 0
        show(folder, here, interval_s)


class ListActions:
    """Runs the commands behind the keys of the list, as `JobActions` does."""

    def cancel(self, folder: str) -> str:
        return run_vjob("cancel", folder, "--wait", str(CANCEL_S), timeout_s=4 * CANCEL_S)

    def compare(self, folders: Sequence[str], width: int) -> str:
        return run_vjob("compare", *folders, timeout_s=REPORT_S, width=width)


class JudgedSource:
    """Reads snapshots and verdicts, and keeps the last snapshot for the keys."""

    def __init__(
        self,
        reader: JudgedReader,
        find_files: Callable[[], Mapping[str, Mapping[str, str]]] = dict,
    ) -> None:
        """`find_files`: logs by node and kind, where they do not lie in one folder."""
        self.find_files = find_files
        self.last: Snapshot | None = None
        """The last snapshot."""
        self._reader = reader

    def read(self) -> tuple[Snapshot, Verdict]:
        self.last, verdict = self._reader.read()
        return self.last, verdict

    def find_folder(self) -> Path | None:
        """The folder that holds the nodes' files now."""
        last = self.last
        if last is None:
            return None
        if is_plain_job(last):
            return None
        if not last.record_state:
            return Path(last.folder)
        if last.attempt is None:
            return None
        return RunFolder(Path(last.folder)).attempt(last.attempt).path


class JobActions:
    """Runs the commands behind the keys, each as `vjob` in a process of its own.

    A report's computing would hold up the screen, and a cancel that has begun must go on when the
    screen is left.
    """

    def __init__(self, source: JudgedSource) -> None:
        self._source = source
        self.lines = LogFiles(source.find_folder, classify_error, source.find_files)

    @property
    def cancel_text(self) -> str:
        last = self._source.last
        if last is None or not last.record_state:
            return ""  # logs alone, or a job that scancel ends
        ids = " and ".join(job.id for job in last.scheduler.jobs) or last.run
        return (
            f"vjob cancel {last.run}: ranks that can are asked to checkpoint and to leave, for at "
            f"most {CANCEL_S} s; then {ids} ends, whatever it is at."
        )

    def cancel(self) -> str:
        return self._run("cancel", "--wait", str(CANCEL_S), timeout_s=4 * CANCEL_S)

    def report(self) -> str:
        return self._run("report", timeout_s=REPORT_S)

    def stacks(self) -> str:
        return self._run("stacks", timeout_s=STACKS_S)

    def _run(self, command: str, *options: str, timeout_s: float) -> str:
        last = self._source.last
        if last is None:
            raise VjobError("nothing is known of the job yet")
        job = name_job(last) if is_plain_job(last) else last.folder
        return run_vjob(command, job, *options, timeout_s=timeout_s)


def run_vjob(*words: str, timeout_s: float, width: int = 80) -> str:
    """The output of a command of ours; VjobError with its words where it fails."""
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(width), "VJOB_WIDTH": str(width)}
    done = run(build_own_command(*words), env=env, timeout_s=timeout_s)
    if done.code != 0:
        raise VjobError("\n".join(part for part in (done.err, done.out) if part.strip()))
    return done.out.strip()


def classify_error(text: str) -> str:
    """Name of the known error that a line is; warnings are none."""
    row = find_row(classify_line(text) or "")
    return row.name if row is not None and row.proof in (Proof.CAUSE, Proof.FALLOUT) else ""

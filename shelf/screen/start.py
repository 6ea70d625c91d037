"""Start the live screen, connected to a job's reader and to `vjob`'s commands.

Textual is imported only when the screen is shown.
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
"""Streams that must be terminals: keys come from the first, and Textual draws on the last."""


def can_show(environ: Mapping[str, str]) -> bool:
    """Return True if all streams are a terminal with cursor control and Textual is installed."""
    if environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    streams = [getattr(sys, name) for name in STREAMS]
    are_terminals = all(stream is not None and stream.isatty() for stream in streams)
    return are_terminals and importlib.util.find_spec("textual") is not None


CANCEL_S = 60
REPORT_S, STACKS_S = 1800, 120


def show(job: str, here: Path, interval_s: float) -> int:
    """Show the screen until the user leaves it; return the exit code of the last verdict.

    Raise InputError if the word names no job.
    """
    from vjob.shelf.screen.app import run_screen  # late: Textual takes long to import

    reader = open_reader(job, here)
    source = JudgedSource(JudgedReader(reader), getattr(reader, "find_logs", dict))
    return run_screen(source, JobActions(source), interval_s=interval_s)


def show_runs(here: Path, interval_s: float) -> int:
    """Show the list of runs, and the screen of each that is opened, until the list is left."""
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
        """`find_files` returns logs by node and kind, if they are not in one folder."""
        self.find_files = find_files
        self.last: Snapshot | None = None
        """The last snapshot."""
        self._reader = reader

    def read(self) -> tuple[Snapshot, Verdict]:
        self.last, verdict = self._reader.read()
        return self.last, verdict

    def find_folder(self) -> Path | None:
        """Return the folder that now holds the nodes' files."""
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
    """Runs the commands of keys, each as a `vjob` process of its own.

    Computing a report would block the screen, and a cancel must continue when the screen is left.
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
            f"vjob cancel {last.run}: ranks that can are asked to checkpoint and exit, for at "
            f"most {CANCEL_S} s; then {ids} ends, whatever it is doing."
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
            raise VjobError("nothing is known about the job yet")
        job = name_job(last) if is_plain_job(last) else last.folder
        return run_vjob(command, job, *options, timeout_s=timeout_s)


def run_vjob(*words: str, timeout_s: float, width: int = 80) -> str:
    """Return the output of one of our commands; raise VjobError with its output if it fails."""
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(width), "VJOB_WIDTH": str(width)}
    done = run(build_own_command(*words), env=env, timeout_s=timeout_s)
    if done.code != 0:
        raise VjobError("\n".join(part for part in (done.err, done.out) if part.strip()))
    return done.out.strip()


def classify_error(text: str) -> str:
    """Return the name of a known error in a line; empty for others, and for warnings."""
    row = find_row(classify_line(text) or "")
    return row.name if row is not None and row.proof in (Proof.CAUSE, Proof.FALLOUT) else ""

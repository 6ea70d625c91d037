"""Actions of the keys of the screen and of the list: each runs a `vjob` process of its own.

They are called in threads, never in the screen's own, since they may wait for a file server.
Computing a report would block the screen, and a cancel must continue when the screen is left.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.log_lines.errors import classify_line, find_row
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.jobs.monitor.rules.base import is_plain_job, name_job
from vjob.jobs.process import build_own_command, run
from vjob.shelf.screen.log_files import LogFiles

CANCEL_S = 60
REPORT_S, STACKS_S = 1800, 120


class ListActions:
    """Runs the commands behind the keys of the list, as `JobActions` does."""

    def cancel(self, folder: str) -> str:
        return run_vjob("cancel", folder, "--wait", str(CANCEL_S), timeout_s=4 * CANCEL_S)

    def compare(self, folders: Sequence[str], width: int) -> str:
        return run_vjob("compare", *folders, timeout_s=REPORT_S, width=width)


class JobActions:
    """Runs the commands of keys on the job that a reader reads, and reads the job's new lines."""

    def __init__(self, reader: JudgedReader) -> None:
        self._reader = reader
        self.lines = LogFiles(self.find_folder, classify_error, reader.find_logs)

    def find_folder(self) -> Path | None:
        """Return the folder that now holds the nodes' files."""
        last = self._reader.last
        if last is None or is_plain_job(last):
            return None
        if not last.record_state:
            return Path(last.folder)
        if last.attempt is None:
            return None
        return RunFolder(Path(last.folder)).attempt(last.attempt).path

    @property
    def cancel_text(self) -> str:
        """Describe `cancel` for the confirmation; empty if it is not possible."""
        last = self._reader.last
        if last is None or not last.record_state:
            return ""  # logs alone, or a job that scancel ends
        ids = " and ".join(job.id for job in last.scheduler.jobs) or last.run
        return (
            f"vjob cancel {last.run}: ranks that can are asked to checkpoint and exit, for at "
            f"most {CANCEL_S} s; then {ids} ends, whatever it is doing."
        )

    def cancel(self) -> str:
        """Cancel the job; return a sentence."""
        return self._run("cancel", "--wait", str(CANCEL_S), timeout_s=4 * CANCEL_S)

    def report(self) -> str:
        """Write the report; return its path."""
        return self._run("report", timeout_s=REPORT_S)

    def stacks(self) -> str:
        """Return the stacks of every rank, as lines of text."""
        return self._run("stacks", timeout_s=STACKS_S)

    def _run(self, command: str, *options: str, timeout_s: float) -> str:
        last = self._reader.last
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

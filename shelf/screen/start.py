"""Start the live screen, connected to a job's reader and to `vjob`'s commands.

Textual is imported only when the screen is shown.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader
from vjob.shelf.screen.actions import JobActions, ListActions

STREAMS = ("stdin", "stdout", "stderr")
"""Streams that must be terminals: keys come from the first, and Textual draws on the last."""


def can_show(environ: Mapping[str, str]) -> bool:
    """Return True if all streams are a terminal with cursor control and Textual is installed."""
    if environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    streams = [getattr(sys, name) for name in STREAMS]
    are_terminals = all(stream is not None and stream.isatty() for stream in streams)
    return are_terminals and importlib.util.find_spec("textual") is not None


def show(job: str, here: Path, interval_s: float) -> int:
    """Show the screen until the user leaves it; return the exit code of the last verdict.

    Raise InputError if the word names no job.
    """
    from vjob.shelf.screen.app import run_screen  # late: Textual takes long to import

    reader = JudgedReader(open_reader(job, here))
    return run_screen(reader, JobActions(reader), interval_s=interval_s)


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

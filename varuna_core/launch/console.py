"""Output of the launcher: its own messages, and the lines of nodes and ranks.

Ranks' lines come from the node logs that the agents write into the run folder, as `vjob logs -f`
reads them. A terminal that is gone is no reason to end a run: what cannot be shown is in the files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from varuna_core.agent.processes.output import Sink
from varuna_core.records.logs.tail import Follower, clean
from varuna_core.records.runfolder import AttemptFolder

POLL_S = 0.3
FILES_PER_S = 500
"""How many log files are looked at in a second, at most."""


class Console:
    """Standard output for ranks' standard output, standard error for all else."""

    def __init__(self) -> None:
        self._log: Sink | None = None
        self._deaf: set[TextIO] = set()
        self._followers: list[tuple[str, TextIO, Follower]] = []
        self._next_look = 0.0

    def keep(self, path: Path) -> None:
        """From now on our own words go to this file too."""
        self._log = Sink(path)

    def say(self, text: str) -> None:
        self.pass_on("launch: " + text)

    def pass_on(self, line: str) -> None:
        """A line of our own or of an agent."""
        if self._log is not None:
            self._log.write(f"{line}\n".encode("utf-8", "replace"))
        self._show(clean(line), sys.stderr)

    def follow(self, attempt: AttemptFolder, names: Sequence[str]) -> None:
        """Show what the ranks of these nodes write."""
        for name in names:
            for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
                self._followers.append((name, stream, Follower(attempt.node_log(name, kind))))

    def look(self, *, final: bool = False) -> None:
        """The new lines of all ranks, if it is time for them."""
        now = time.monotonic()
        if not final and now < self._next_look:
            return
        self._next_look = now + max(POLL_S, len(self._followers) / FILES_PER_S)
        for name, stream, follower in self._followers:
            for line in follower.read(final=final):
                self._show(f"{name} | {line}", stream)

    def _show(self, line: str, stream: TextIO) -> None:
        if stream in self._deaf:
            return
        try:
            print(line, file=stream, flush=True)
        except (OSError, ValueError):
            self._deaf.add(stream)
        except UnicodeEncodeError:
            print(line.encode("ascii", "backslashreplace").decode(), file=stream, flush=True)


def open_outputs() -> None:
    """Open outputs that the launcher was started without: the run needs none of them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def flush_outputs() -> None:
    """Flush outputs at the end; what a closed terminal did not take is in the files."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The interpreter flushes once more at its exit, and would exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

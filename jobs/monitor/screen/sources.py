"""What the screen is fed with, and what it can have done: small interfaces.

All of it is called in threads, never in the screen's own: it may wait for a file server.
"""

from __future__ import annotations

from typing import Protocol

from vjob.jobs.monitor.model.snapshot import Line, Snapshot
from vjob.jobs.monitor.model.verdict import Verdict


class Source(Protocol):
    """Tells how the job is now."""

    def read(self) -> tuple[Snapshot, Verdict]:
        """A look; what it raises is shown, and the next look is tried all the same."""


class Lines(Protocol):
    """Tells what was written to logs."""

    def read_new(self, node: str | None) -> list[Line]:
        """What `node`, or with None every node, wrote since the last call.

        A call for another node than the one before begins with its last few hundred lines: what is
        not looked at costs nothing. A `Line.kind` marks an error: the screen finds the next one.
        """


class Actions(Protocol):
    """What keys of the screen have done besides looking."""

    @property
    def lines(self) -> Lines: ...

    @property
    def cancel_says(self) -> str:
        """What `cancel` will do, for the question before it; empty where it cannot."""

    def cancel(self) -> str:
        """Returns a sentence."""

    def report(self) -> str:
        """Writes the report; returns where it lies."""

    def stacks(self) -> str:
        """What every rank is at now; lines of text."""

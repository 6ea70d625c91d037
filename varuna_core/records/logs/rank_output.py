"""Output of one rank: its lines in the log of its node, which begin with its tag.

In run folders of before it is a file of its own, the bytes as the rank wrote them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from varuna_core.records.files import list_files, open_file, read_json
from varuna_core.records.logs.tail import last_lines, show_lines
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import AttemptFolder

END_BYTES = 1024 * 1024
"""Bytes at the end of a node's log in which the last lines of a rank are searched for."""


@dataclass(frozen=True)
class RankOutput:
    """Location of a rank's standard output or error."""

    path: Path
    rank: int
    is_own: bool
    """True if the file has no lines of other ranks."""

    def select(self, data: bytes) -> bytes:
        """Return the rank's part of data that was read from the file, without its tags."""
        if self.is_own:
            return data
        lines = re.findall(rb"^%d: (.*)" % self.rank, data, re.MULTILINE)
        return b"".join(line + b"\n" for line in lines)

    def read(self, most: int = -1) -> bytes:
        """Return what the rank wrote, within the first `most` bytes of the file if `most` is set;
        empty if the file does not exist yet."""
        try:
            with open_file(self.path) as handle:
                return self.select(handle.read(most))
        except OSError:
            return b""

    def read_end(self, most: int) -> bytes:
        """Return the rank's last bytes in the file, starting at a whole line."""
        try:
            with open_file(self.path) as handle:
                start = max(0, handle.seek(0, 2) - most)
                handle.seek(start)
                data = handle.read(most)
        except OSError:
            return b""
        return self.select(data.partition(b"\n")[2] if start and b"\n" in data else data)

    def last_lines(self, count: int) -> List[str]:
        """Return the last lines, with control characters escaped."""
        if self.is_own:
            return last_lines(self.path, count)
        return show_lines(self.read_end(END_BYTES), count)


def locate_output(attempt: AttemptFolder, plan: Optional[Plan], rank: int, kind: str) -> RankOutput:
    """`kind` is out or err."""
    own = RankOutput(attempt.rank_log(rank, kind), rank, is_own=True)
    if plan is None or not 0 <= rank < plan.world or own.path.exists():
        return own
    report = read_json(attempt.node_report(plan.node_of_rank(rank).index))
    host = report.get("host") if isinstance(report, dict) else None
    if not isinstance(host, str) or not host or "/" in host:  # whoever wrote it chooses no file
        return own
    return RankOutput(attempt.node_log(host, kind), rank, is_own=False)


def list_outputs(attempt: AttemptFolder) -> List[Path]:
    """List everything that ranks printed: the logs of nodes or, in older run folders, of ranks."""
    own = list_files(attempt.rank_log(0, "out").parent, "*.out")
    return own or list_files(attempt.path, "*.out")

"""Read the output of one rank: its lines in the log of its node, which begin with its tag.

In older run folders the output is a separate file with the bytes as the rank wrote them. Also reads
what Slurm wrote about failed nodes into the logs of batch scripts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, Iterable, List, Optional

from varuna_core.facts.cause import Actor, End, EndCause
from varuna_core.facts.known import Evidence, Sure
from varuna_core.records.exits import NODE_LOST
from varuna_core.records.files import list_files, open_file, read_json
from varuna_core.records.logs.tail import last_lines, show_lines
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import AttemptFolder

NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
LAST_LINES = 400
"""Number of lines at the end of a batch script's log that are searched."""
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
    """Locate a rank's output; `kind` is out or err."""
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


def find_node_failure(logs: Iterable[Path], attempt: int) -> Optional[End]:
    """Find the failure of a node that Slurm reported in the logs of an attempt's batch scripts.

    srun names the failed node. The line of slurmstepd names the node on which it runs, which may be
    healthy.
    """
    names: Dict[str, None] = {}
    is_told = False
    for path in logs:
        lines = last_lines(path, LAST_LINES)
        begun = [at for at, line in enumerate(lines) if line.startswith(f"attempt {attempt}: ")]
        for line in lines[begun[0] if begun else 0 :]:
            found = NODE_FAILURE.search(line)
            if found is not None:
                names[found[1]] = None
            is_told = is_told or found is not None or "DUE TO NODE FAIL" in line
    seen = Evidence("scheduler's log", Sure.REPORTED)
    end = End(EndCause.NODE_FAIL, Actor.NODE, code=NODE_LOST, node=",".join(names))
    return replace(end, evidence=(seen,)) if is_told else None

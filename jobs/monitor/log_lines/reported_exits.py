"""Parse the ends of ranks that torchrun or srun prints into the log of a job whose ranks left no
exits: they name the node, which a log of several nodes does not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from varuna_core.records.files import as_whole
from vjob.jobs.monitor.log_lines.raised import SHELL
from vjob.jobs.monitor.model.snapshot import ReportedExit

_BY_TORCHRUN = re.compile(
    r"^ +host +: (?P<node>\S+)\n +rank +: (?P<rank>\d+) \(local_rank: \d+\)\n"
    r"(?P<text> +exitcode +: (?P<code>-?\d+) \(pid: \d+\))",
    re.MULTILINE,
)
_BY_SRUN = re.compile(
    r"^srun: error: (?P<node>[^\s:]+): (?P<who>tasks? [\d,-]+): "
    r"(?:Killed|Exited with exit code (?P<code>\d+))",
    re.MULTILINE,
)
_SRUN_ENDS = re.compile(
    r"^srun: (Terminating|Force Term|Job step aborted|First task|launch/slurm: _step_signal)"
    r"|\*\*\* (STEP|JOB) \S+ ON \S+ CANCELLED",
    re.MULTILINE,
)
"""Lines after which srun itself kills the tasks that are left."""
_STEP = re.compile(r"^srun: .*StepId=(\S+)", re.MULTILINE)
_KILLED = SHELL + 9


def parse_reported_exits(lines: Sequence[str]) -> tuple[ReportedExit, ...]:
    """Parse the ends of ranks or tasks from the last lines of a log: the ends that torchrun
    reports, by rank, or else those that srun reports for its tasks, which may be launchers. Return
    none if the lines are from several steps in a row."""
    text = "\n".join(lines)
    by_torchrun = [
        ReportedExit(
            who=f"rank {match['rank']}",
            rank=int(match["rank"]),
            node=match["node"],
            code=SHELL - int(match["code"]) if match["code"][0] == "-" else int(match["code"]),
            text=match["text"].strip(),
        )
        for match in _BY_TORCHRUN.finditer(text)
    ]
    ends = _SRUN_ENDS.search(text)
    by_srun = [
        ReportedExit(
            who=match["who"],
            task=as_whole(match["who"].partition(" ")[2]),
            node=match["node"],
            code=_KILLED if match["code"] is None else int(match["code"]),
            text=match[0],
        )
        for match in _BY_SRUN.finditer(text, 0, len(text) if ends is None else ends.start())
    ]
    found = by_torchrun or by_srun
    is_one_step = len(set(_STEP.findall(text))) <= 1 and len({x.who for x in found}) == len(found)
    return tuple(found) if is_one_step else ()

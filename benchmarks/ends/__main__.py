"""Stage ends of jobs, and compare what vjob says of each with what happened.

    python -m benchmarks.ends [--only TEXT] [--staged] [--write]

`vjob status --json` and `vjob report --json` are asked about every row, and typed facts compared:
cause, actor, rank, node, kinds of remedies. --staged leaves out the rows that run a program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from benchmarks import RESULTS
from benchmarks.ends.rows import Place, Row
from benchmarks.ends.staging import answers_of_slurm, stage
from benchmarks.ends.table import list_rows
from tests.command import Vjob
from vjob.shelf.commands.cli import cli

UNFIT: Mapping[Place, str] = {
    Place.LOCAL: r"cluster\.exclude|squeue|sbatch|scontrol|scancel|--\w+ of the job|--mem\b|queue"
    r"|memory_gb|list of machines|a node was lost|cluster\.sbatch",
    Place.MACHINES: r"cluster\.exclude|squeue|sbatch|scontrol|--mem\b|queue|memory_gb"
    r"|walltime|cluster\.sbatch",
    Place.LAB: r"list of machines|the job that it runs inside",
    Place.ALLOCATION: r"cluster\.exclude|cluster\.sbatch|memory_gb|walltime_min|list of machines",
    Place.FOREIGN: r"\b(train|cluster|morph|parallel|container|program|model)\.(?!bin)[a-z_]+\b"
    r"|log_folder|node group|list of machines|vjob (report|cancel|submit)",
    Place.BARE: r"\b(train|cluster|morph|parallel|container|program|model)\.(?!bin)[a-z_]+\b"
    r"|log_folder|node group|list of machines|vjob (report|cancel|submit|stacks)",
}
"""Words of keys, options and tools that a kind of job does not have."""
REFINED = {"oom-host": ("rank-signal", "rank-exit"), "start-failed": ("unknown",)}
"""Causes that only lines of logs tell, and what the record has in their place."""
PAGE = RESULTS / "ends.md"


@dataclass(frozen=True)
class Heard:
    """Two documents about one job."""

    status: Mapping[str, Any]
    report: Mapping[str, Any]


def ask(job: str) -> Heard:
    """`vjob status` and `vjob report` about a job, in this process."""
    return Heard(_run("status", job), _run("report", job))


def _run(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli, [*words, "--json"])
    start = done.stdout.find("{")
    if start < 0:
        return {"problem": (done.stdout + done.stderr).strip()[:200], "why": repr(done.exception)}
    found: dict[str, Any] = json.loads(done.stdout[start:])
    return found


def hear(row: Row, folder: Path) -> Heard:
    """Stage the row, or run its program, and ask."""
    if row.scene is None:
        vjob = Vjob(folder)
        (folder / "train.py").write_text(row.program)
        vjob("run", "-n", str(row.num_ranks), "train.py", code=None)
        with mock.patch.dict(os.environ, {"XDG_STATE_HOME": vjob.env["XDG_STATE_HOME"]}):
            return ask("last")
    with answers_of_slurm(row, folder):
        return ask(stage(row, folder))


def list_misses(row: Row, heard: Heard) -> Iterator[str]:
    """Each fact that is not as it should be."""
    want, status = row.want, heard.status
    if "verdict" not in status:
        yield f"status failed: {status}"
        return
    verdict = status["verdict"]
    if want.health and verdict["health"] != want.health:
        yield f"health {verdict['health']}, not {want.health}"
    end = verdict.get("end") or {}
    cause = None if want.cause is None else want.cause.value
    if end.get("cause") != cause:
        yield f"cause {end.get('cause')}, not {cause}"
    if want.actor is not None and end.get("actor") != want.actor.value:
        yield f"actor {end.get('actor')}, not {want.actor.value}"
    if want.cause is not None:
        if end.get("rank") != want.rank:
            yield f"rank {end.get('rank')}, not {want.rank}"
        if (end.get("node") or "") != want.node and row.place is not Place.FOREIGN:
            yield f"node {end.get('node')!r}, not {want.node!r}"
    found = {
        (one["action"], one["target"])
        for part in verdict["findings"]
        if part["part"] == "main"
        for one in part["remedies"]
    }
    for action, target in want.remedies:
        if (action.value, None if target is None else target.value) not in found:
            yield f"no remedy {action.value} {target.value if target else ''}".rstrip()
    for action, target in want.never:
        if (action.value, None if target is None else target.value) in found:
            yield f"a remedy {action.value} {target.value if target else ''}".rstrip()
    told = f"{verdict['reason']}. {verdict['advice']}"
    if want.silent and re.search(rf"\b{want.silent}\b", told):
        yield f"says {want.silent!r}: {told[:150]}"
    unfit = re.search(UNFIT[row.place], told)
    if unfit:
        yield f"tells of {unfit.group()!r}: {told[:200]}"
    yield from _list_disagreements(row, heard)


def _list_disagreements(row: Row, heard: Heard) -> Iterator[str]:
    """Facts that the record, or the report, states otherwise than the verdict."""
    end = heard.status["verdict"].get("end") or {}
    record = heard.status.get("end") or {}
    if record.get("cause") in REFINED.get(end.get("cause", ""), ()):
        return
    for name in ("cause", "actor", "rank", "node"):
        if record and end and record.get(name) != end.get(name):
            yield f"the record has {name} {record.get(name)!r}, the verdict {end.get(name)!r}"
    told = heard.report.get("end")
    if row.place in (Place.FOREIGN, Place.BARE):
        return
    for name in ("cause", "rank"):
        if end and (told or {}).get(name) != end.get(name):
            yield f"the report has {name} {(told or {}).get(name)!r}, the verdict {end.get(name)!r}"


def try_row(row: Row) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="ends-") as folder:
        return list(list_misses(row, hear(row, Path(folder))))


def render_page(rows: Sequence[Row], misses: Mapping[str, Sequence[str]]) -> str:
    """A table of places, and every miss."""
    bad = [row for row in rows if misses[row.title]]
    lines = [
        "# Staged ends",
        "",
        "Made by `python -m benchmarks.ends --write`. Each row is the end of a job, staged by",
        "vjob's own writers or really run; `vjob status --json` and `vjob report --json` are",
        "asked, and cause, actor, rank, node and kinds of remedies compared with what happened.",
        "",
        "Not told apart where no hook of vjob's ran in a rank's Python: an exception that ended",
        "it, and one that it caught and printed less than 5 s before `sys.exit(1)`.",
        "",
        "| jobs | ends | right |",
        "|---|---|---|",
    ]
    total, right = Counter[str](), Counter[str]()
    for row in rows:
        kind = f"{row.place.value}, really run" if row.program else row.place.value
        total[kind] += 1
        right[kind] += not misses[row.title]
    lines += [f"| {kind} | {total[kind]} | {right[kind]} |" for kind in total]
    lines.append(f"| all | {len(rows)} | {len(rows) - len(bad)} |")
    for row in bad:
        lines.append(f"- **{row.title}**: {'; '.join(misses[row.title])}".replace("|", "\\|"))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose title has this text")
    parser.add_argument("--staged", action="store_true", help="leave out rows that run a program")
    parser.add_argument("--write", action="store_true", help="renew the page of results")
    options = parser.parse_args()
    rows = [row for row in list_rows() if options.only in row.title]
    rows = [row for row in rows if not (options.staged and row.program)]
    misses: dict[str, Sequence[str]] = {}
    for row in rows:
        misses[row.title] = try_row(row)
        for miss in misses[row.title]:
            print(f"{row.title}: {miss}", flush=True)
    num_bad = sum(map(bool, misses.values()))
    print(f"{len(rows) - num_bad} of {len(rows)} ends are right")
    if options.write:
        PAGE.write_text(render_page(rows, misses))
    sys.exit(1 if num_bad else 0)


if __name__ == "__main__":
    main()

"""`vjob list`: every run of this user, one line each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from varuna_core.records.formatting import align_columns
from varuna_core.records.logs.tail import clean
from vjob.jobs.runs.find import RunView, view_runs
from vjob.jobs.schedulers import run_index as index


def list_runs(
    limit: int | None, describe: Callable[[RunView], dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Runs as plain rows, the newest last; `describe` tells more of one, over what stands here."""
    index.check_readable()
    runs = index.list_runs()
    rows = []
    for view in view_runs(runs[-limit:] if limit else runs):
        record = view.record
        rows.append(
            {
                "run": record.run,
                "jobs": [job.id for job in record.jobs],
                "state": view.state,
                "submitted": record.submitted,
                "message": record.message,
                "folder": str(view.run.path),
                **(describe(view) if describe is not None else {}),
            }
        )
    return rows


def render(rows: list[dict[str, Any]], width: int | None = None) -> str:
    """A table, or what to do where there is nothing; lines end at `width`, where one is given."""
    if not rows:
        return "no runs yet; `vjob submit conf.yaml` makes one"
    cells = [("JOB", "STATE", "SUBMITTED", "RUN", "")]
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["submitted"]))
        message = clean(" ".join(str(row["message"]).split()))
        cells.append((",".join(row["jobs"]) or "-", row["state"], when, row["run"], message))
    lines = align_columns(cells)
    if width is not None:
        start = 2 + max(map(len, align_columns([row[:-1] for row in cells])))
        lines = [_cut_message(line, start, width) for line in lines]
    return "\n".join(lines)


def _cut_message(line: str, start: int, width: int) -> str:
    """The line cut at `width`, but never before the message, which starts at `start`."""
    if len(line) <= width:
        return line
    return line[: width - 3] + "..." if width > start + 3 else line[:start].rstrip()


def known_jobs() -> list[str]:
    """Words that stand for a run, for shell completion; asks no scheduler."""
    from varuna_core.records.record import read_record

    words = {"last"}
    for run in index.list_runs():
        record = read_record(run)
        if record is not None:
            words |= {record.run, record.name, *(job.id for job in record.jobs)}
    return sorted(words)

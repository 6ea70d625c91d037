"""`vjob compare`: the figures of several jobs beside each other, as a table, JSON or a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from varuna_core.records.files import write_atomic
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.reporting.report import Say, check_libraries, find_folder

if TYPE_CHECKING:
    from vjob.reports.page.comparison import Compared


def compare_jobs(
    names: Sequence[str], here: Path, say: Say, *, as_json: bool, page: Path | None, cdn: bool
) -> None:
    """Print the jobs' figures as a table, or as JSON, or write them as a page."""
    if len(names) < 2:
        raise InputError("two jobs at least, such as: vjob compare 4711 last")
    folders = [find_folder(name, here) for name in names]
    check_libraries("plotly", "jinja2")
    from vjob.reports.export.text import render_table
    from vjob.reports.page import comparison

    jobs = [_load(folder, run) for folder, run in folders]
    if as_json:
        say(json.dumps(comparison.build_json(jobs), indent=1))
    elif page is None:
        for table in comparison.build_comparison(jobs):
            say(f"{table.title.upper()}\n" + "\n".join(render_table(table, len(table.rows))) + "\n")
    if page is not None:
        made_at = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
        write_atomic(here / page, comparison.render_comparison(jobs, made_at=made_at, cdn=cdn))
        say(f"wrote {page}")


def _load(folder: Path, run: RunFolder | None) -> Compared:
    from vjob.reports.analysis.measures import analyse
    from vjob.reports.load.sources import SourceError
    from vjob.reports.load.tables import load_job
    from vjob.reports.page.comparison import Compared, flatten

    try:
        job = load_job(folder)
    except SourceError as error:
        raise InputError(str(error)) from None
    conf = _read_conf(run) if run is not None else {}
    settings = flatten(conf) if conf else dict(job.job_info)
    return Compared(
        name=job.sources.name,
        job=job,
        analysis=analyse(job),
        settings=settings,
        has_conf=bool(conf),
    )


def _read_conf(run: RunFolder) -> object:
    """The resolved conf, its secrets redacted; empty where it cannot be read."""
    try:
        return yaml.safe_load(run.resolved.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}

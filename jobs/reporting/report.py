"""Find a job's files and pass them to `reports`: `vjob report`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.records import record as records
from varuna_core.records.files import write_atomic
from varuna_core.records.record import read_run_end
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.readers.scheduler import SchedulerDesk
from vjob.jobs.monitor.rules.base import is_over
from vjob.jobs.runs.find import RunView, find_run, refuse_empty, view_run

if TYPE_CHECKING:
    from vjob.reports.analysis.measures import Analysis
    from vjob.reports.export.tables import JobTables
    from vjob.reports.load.tables import Job

Say = Callable[[str], object]
MORE_EVENTS = 200_000
"""Events of additional steps for the page's selector, about two megabytes."""


@dataclass(frozen=True, kw_only=True)
class ReportOutputs:
    """Outputs of a report; only the page if none is named."""

    text: bool = False
    as_json: bool = False
    export: str | None = None
    """Name of an exporter."""
    output: Path | None = None
    """Path of the export, or else of the page."""
    is_opened: bool = False

    @property
    def has_page(self) -> bool:
        asked = (self.output is not None and self.export is None) or self.is_opened
        return asked or not (self.text or self.as_json or self.export)


def find_folder(job: str, here: Path) -> tuple[Path, RunFolder | None]:
    """Return the folder of JOB, which may also be a path to a folder of logs or to one log."""
    refuse_empty(job)
    try:
        run = find_run(job, here)
    except InputError:
        path = here / Path(job).expanduser()
        if os.access(path, os.R_OK if path.is_file() else os.R_OK | os.X_OK):
            return path, None
        raise
    return run.path, run


def look_at(run: RunFolder | None) -> RunView | None:
    """Return the run that JOB names, with the state of its jobs; None for a folder of logs, or if
    not known."""
    if run is not None:
        with contextlib.suppress(VjobError):
            return view_run(run)
    return None


def goes_on(view: RunView | None) -> bool:
    """Return True for a run that is not over, by the same test as `vjob status`: ranks may have
    written their end seconds before the scheduler reports it."""
    if view is None or view.record.state != records.SUBMITTED:
        return False
    name = view.record.scheduler
    desk = SchedulerDesk(view.run, name, view=lambda _: view, watches_nodes=False)
    return not is_over(RunReader(view.run, num_lines=0, desk=desk).read())


def write_report(job: str, here: Path, say: Say, wanted: ReportOutputs) -> None:
    folder, run = find_folder(job, here)
    check_libraries(*(("plotly", "jinja2") if wanted.has_page else ()))
    from vjob.reports.analysis import findings
    from vjob.reports.export import text as texts

    view = look_at(run)  # before the files are read: what is written last is then in them
    found, analysed = read_job(folder, view, more_events=MORE_EVENTS if wanted.has_page else 0)
    sentences = findings.find_all(found, analysed)
    partial = goes_on(view)
    try:
        if wanted.export is not None:
            _write_export(found, analysed, say, wanted)
        if wanted.has_page:
            from vjob.reports.page.run_page import render_page

            page = render_page(found, analysed, sentences, is_partial=partial, made_at=format_now())
            _write_page(page, wanted, here, folder, say)
    except OSError as error:
        raise VjobError(f"{error.filename or folder}: {error.strerror}") from None
    if wanted.as_json:
        end = None if view is None else read_run_end(view.run, view.record)
        value = texts.build_json(found, analysed, sentences, is_partial=partial, end=end)
        say(json.dumps(value, indent=1, default=float))
    if wanted.text:
        say(texts.render_text(found, analysed, sentences, is_partial=partial).rstrip("\n"))


def render_report(folder: Path, run: RunFolder | None) -> str:
    """Render the present page of a job; raise VjobError if it cannot be read or drawn."""
    check_libraries("plotly", "jinja2")
    from vjob.reports.analysis.findings import find_all
    from vjob.reports.page.run_page import render_page

    view = look_at(run)
    job, analysis = read_job(folder, view, more_events=MORE_EVENTS)
    partial = goes_on(view)
    return render_page(
        job,
        analysis,
        find_all(job, analysis),
        is_partial=partial,
        made_at=format_now(),
    )


def read_job(
    folder: Path,
    view: RunView | None = None,
    *,
    more_events: int = 0,
) -> tuple[Job, Analysis]:
    """Read and analyse a job's files; raise InputError if they are not those of a job.

    Its state is that of `view`, as in `vjob list`.
    """
    from vjob.reports.analysis.measures import analyse
    from vjob.reports.load.sources import SourceError
    from vjob.reports.load.tables import RunState, load_job

    try:
        job = load_job(folder, more_events=more_events)
    except SourceError as error:
        raise InputError(str(error)) from None
    if view is not None:
        job.state = RunState(view.state, view.record.message, time.time())
    return job, analyse(job)


def format_now() -> str:
    """Return the time at which a page is made."""
    return f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _write_export(job: Job, analysis: Analysis, say: Say, wanted: ReportOutputs) -> None:
    from vjob.reports.export import perfetto, tables
    from vjob.reports.export.formats import EXPORTERS

    name = job.sources.name
    target = wanted.output or Path(
        f"{name}.perfetto.json.gz" if wanted.export == "perfetto" else f"{name}-{wanted.export}"
    )
    if wanted.export in EXPORTERS.list_plugins():
        write = EXPORTERS.load(wanted.export)
        if write is None:
            raise VjobError(f"there is no export {wanted.export}: its plug-in could not be loaded")
        paths = ", ".join(map(str, write(tables.JobTables(job), target)))
        say(f"wrote {paths}")
        return
    if wanted.export in ("csv", "parquet"):
        write = tables.write_csv if wanted.export == "csv" else tables.write_parquet
        written = write(tables.JobTables(job), target)
        say(f"wrote {len(written)} tables to {target}; docs/notebook.md has their columns")
        return
    if job.events.empty:
        raise VjobError(
            f"{name} has no events of ranks to write as {wanted.export}: no rank wrote a trace "
            "(docs/report.md, The trace); --export parquet writes what there is"
        )
    steps = sorted({int(step) for step in job.events["step"]})
    which = ", ".join(map(str, steps)) if len(steps) < 9 else f"{steps[0]} to {steps[-1]}"
    count = perfetto.write_perfetto(job, analysis, target)
    say(f"wrote {target}, {count} slices of steps {which}: open it in ui.perfetto.dev")


def _write_page(page: str, wanted: ReportOutputs, here: Path, folder: Path, say: Say) -> None:
    asked = wanted.output if wanted.export is None else None
    target = here / (asked or _choose_page(folder))
    write_atomic(target, page)
    say(f"wrote {target}, {len(page) / 1e6:.1f} MB")
    if wanted.is_opened and not webbrowser.open(target.as_uri()):
        say("no browser was found to open it: copy the file, it needs no other files")


def _choose_page(folder: Path) -> Path:
    """Return the page's path: in the job's folder, or beside a single log."""
    if folder.is_dir():
        return RunFolder(folder).report
    return folder.with_name(f"{folder.name}.report.html")


def check_libraries(*more: str) -> None:
    """Raise VjobError if a library that reports need, or one of `more`, is missing."""
    for name in ("numpy", "pandas", "pyarrow", *more):
        if importlib.util.find_spec(name) is None:
            raise VjobError(f"reports need {name}, which is not installed: pip install {name}")


def load_tables(folder: Path) -> JobTables:
    """Return every table of a job, by name."""
    check_libraries()
    from vjob.reports.export.tables import load_job
    from vjob.reports.load.sources import SourceError

    try:
        return load_job(folder)
    except SourceError as error:
        raise InputError(str(error)) from None

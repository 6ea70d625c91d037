"""The report of a job as a live page: read again when its files changed, until the job is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.reporting.report import (
    MORE_EVENTS,
    check_libraries,
    find_folder,
    format_now,
    read_job,
)
from vjob.jobs.runs.find import RunView, is_over, view_run
from vjob.shelf.web.feed import Feed, Made
from vjob.shelf.web.server import LivePage

if TYPE_CHECKING:
    from vjob.reports.analysis.measures import Analysis
    from vjob.reports.load.tables import Job
    from vjob.reports.load.trace_reader import GrowingTraces

EVERY_S = 5.0
GROWS = "Live: this page grows while the job goes on."
GROWS_ALONE = "Live: this page grows with the files of this folder."
OVER = "The job has ended: this page is whole, and grows no more."
Marks = tuple[tuple[str, int, int], ...]
"""Path, size and time of change of every file that a report reads."""


class ReportSource:
    """Makes the parts of the page; nothing new where no file changed."""

    def __init__(self, folder: Path, run: RunFolder | None) -> None:
        self._folder, self._run = folder, run
        self._marks: Marks | None = None
        self._was_over = False
        self._growing: GrowingTraces | None = None
        """What was read of the traces."""

    def make(self) -> Made:
        """InputError where the job cannot be read, such as one whose folder is gone."""
        if not self._folder.exists():
            raise InputError(f"{self._folder} is not there (any more)")
        # Before the files are read: what is written last is then in them.
        view = None if self._run is None else view_run(self._run, warn=False)
        over = view is not None and is_over(view)
        note = OVER if over else GROWS if self._run is not None else GROWS_ALONE
        marks = list_marks(self._folder)
        if marks == self._marks and over == self._was_over:
            return Made(note=note, is_over=over)
        made = self._read(note, over, view)
        self._marks, self._was_over = marks, over
        return made

    def _read(self, note: str, over: bool, view: RunView | None) -> Made:
        from vjob.reports.analysis.findings import find_all
        from vjob.reports.page.html import render_live
        from vjob.reports.page.run_page import build_page

        job, analysis = self._read_job(over, view)
        page = build_page(
            job, analysis, find_all(job, analysis), is_partial=not over, made_at=format_now()
        )
        live = render_live(page)
        return Made(parts=live.parts, blobs=live.steps, note=note, is_over=over)

    def _read_job(self, over: bool, view: RunView | None) -> tuple[Job, Analysis]:
        """What was added to the traces; all of them where one was replaced, and at the end."""
        from vjob.reports.load.blocks import Replaced
        from vjob.reports.load.trace_reader import GrowingTraces

        self._growing = None if over else self._growing or GrowingTraces()
        try:
            return read_job(self._folder, view, more_events=MORE_EVENTS, growing=self._growing)
        except Replaced:
            self._growing = GrowingTraces()
        except BaseException:  # what it has passed over is read again by the next look
            self._growing = None
            raise
        return read_job(self._folder, view, more_events=MORE_EVENTS, growing=self._growing)


def list_marks(folder: Path) -> Marks:
    """The files of a job as they are now."""
    from vjob.reports.load.sources import SourceError, find_sources

    try:
        sources = find_sources(folder)
    except SourceError as error:
        raise InputError(str(error)) from None
    paths = [
        path
        for attempt in sources.attempts
        for path in (
            *(path for _, path in (*attempt.logs, *attempt.errors, *attempt.gpus)),
            *attempt.traces,
            *attempt.profiles,
            *attempt.exits,
        )
    ]
    if sources.run is not None:
        paths += [sources.run.record, *sources.run.path.glob("events*.jsonl")]
    found = []
    for path in paths:
        try:
            facts = path.stat()
        except OSError:
            continue
        found.append((str(path), facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def open_report(job: str, here: Path) -> LivePage:
    """The live page of a job, or of a folder of logs. InputError where it is none."""
    folder, run = find_folder(job, here)
    check_libraries("plotly", "jinja2")
    return LivePage(
        document=_make_document(folder.name),
        files={"page.js": _read_scripts, "plotly.js": _read_plotly},
        feed=Feed(ReportSource(folder, run).make, every_s=EVERY_S),
    )


def _make_document(name: str) -> Callable[[], bytes]:
    def make() -> bytes:
        from vjob.reports.page.html import Page, render_live

        page = Page(name=name, made_at=format_now(), sections=(), figures={})
        return render_live(page).parts["page"]

    return make


def _read_scripts() -> bytes:
    from vjob.reports.page.html import LIVE_SCRIPTS, read_scripts

    return read_scripts(LIVE_SCRIPTS).encode()


def _read_plotly() -> bytes:
    from vjob.reports.page.html import read_plotly

    return read_plotly().encode()

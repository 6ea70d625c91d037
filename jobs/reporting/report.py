"""`vjob report`: finds the job's files and hands them to `reports`, which only this imports."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.records import record as records
from varuna_core.records.files import write_atomic
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.reporting.page_screenshot import write_png
from vjob.jobs.runs.find import find_run, view_run

if TYPE_CHECKING:
    from vjob.reports.analysis.measures import Analysis
    from vjob.reports.load.tables import Job

Say = Callable[[str], object]

MORE_EVENTS = 200_000
"""Of steps that nothing singles out, for the page's selector: some two megabytes."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to write of a report; the page where nothing is named."""

    text: bool = False
    csv: Path | None = None
    parquet: Path | None = None
    trace: Path | None = None
    page: Path | None = None
    png: Path | None = None
    cdn: bool = False
    is_opened: bool = False

    @property
    def has_page(self) -> bool:
        others = (self.csv, self.parquet, self.trace, self.png)
        asked = self.page is not None or self.cdn or self.is_opened
        return asked or not (self.text or any(others))


def find_folder(job: str, here: Path) -> tuple[Path, RunFolder | None]:
    """JOB as everywhere, or the path of any folder of logs, or of one log."""
    try:
        run = find_run(job, here)
    except InputError:
        path = here / Path(job).expanduser()
        if path.exists():
            return path, None
        raise
    return run.path, run


def is_partial(run: RunFolder | None) -> bool:
    """Whether more may still come; what nobody knows is taken as ended."""
    if run is None:
        return False
    with contextlib.suppress(VjobError):
        return view_run(run).record.state == records.SUBMITTED
    return False


def write_report(job: str, here: Path, say: Say, wanted: Wanted) -> None:
    """All that is wanted of one job."""
    folder, run = find_folder(job, here)
    check_libraries(*(("plotly", "jinja2") if wanted.has_page or wanted.png else ()))
    from vjob.reports.analysis import findings
    from vjob.reports.analysis import measures as analysis
    from vjob.reports.export import text as texts
    from vjob.reports.load import tables as load
    from vjob.reports.load.sources import SourceError

    needs_more = wanted.has_page or wanted.png is not None
    try:
        found = load.load_job(folder, more_events=MORE_EVENTS if needs_more else 0)
    except SourceError as error:
        raise InputError(str(error)) from None
    analysed = analysis.analyse(found)
    sentences = findings.find_all(found, analysed)
    partial = is_partial(run)
    try:
        _write_tables(found, analysed, say, wanted)
        if needs_more:
            from vjob.reports.page.run_page import render_page

            made_at = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
            page = render_page(
                found, analysed, sentences, is_partial=partial, made_at=made_at, cdn=wanted.cdn
            )
            _write_page(page, wanted, here, folder, say)
    except OSError as error:
        raise VjobError(f"{error.filename or folder}: {error.strerror}") from None
    if wanted.text:
        say(texts.render_text(found, analysed, sentences, is_partial=partial).rstrip("\n"))


def _write_tables(job: Job, analysis: Analysis, say: Say, wanted: Wanted) -> None:
    from vjob.reports.export import perfetto
    from vjob.reports.export import tables as export

    for target, write in ((wanted.csv, export.write_csv), (wanted.parquet, export.write_parquet)):
        if target is not None:
            written = write(job, analysis, target)
            say(f"wrote {len(written)} tables to {target}")
    if wanted.trace is not None:
        count = perfetto.write_perfetto(job, analysis, wanted.trace)
        steps = sorted({int(step) for step in job.events["step"]})
        which = ", ".join(map(str, steps)) if len(steps) < 9 else f"{steps[0]} to {steps[-1]}"
        said = f" of steps {which}: open it in ui.perfetto.dev" if steps else ""
        say(f"wrote {wanted.trace}, {count} slices{said}")


def _write_page(page: str, wanted: Wanted, here: Path, folder: Path, say: Say) -> None:
    with contextlib.ExitStack() as stack:
        if wanted.has_page:
            target = here / (wanted.page or _choose_page(folder))
            write_atomic(target, page)
            say(f"wrote {target}, {len(page) / 1e6:.1f} MB")
        else:
            target = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "report.html"
            write_atomic(target, page)
        if wanted.png is not None:
            write_png(target, here / wanted.png)
            say(f"wrote {wanted.png}")
        if wanted.is_opened and not webbrowser.open(target.as_uri()):
            say("no browser is here to open it: copy the file, it needs nothing else")


def _choose_page(folder: Path) -> Path:
    """In the job's folder; beside a lone log."""
    if folder.is_dir():
        return RunFolder(folder).report
    return folder.with_name(f"{folder.name}.report.html")


def check_libraries(*more: str) -> None:
    """Those that all reports need, and more."""
    for name in ("numpy", "pandas", "pyarrow", *more):
        if importlib.util.find_spec(name) is None:
            raise VjobError(
                f"reports need {name}, which is not installed: pip install 'vjob[report]'"
            )

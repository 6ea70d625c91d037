"""The `vjob compare` command: compare jobs with each other, or the runs of a sweep."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_core.records.files import read_bytes, write_atomic
from varuna_core.records.formatting import wrap_text
from varuna_core.records.logs.tail import fold
from varuna_core.records.record import format_commit, read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.api.face import JobLike, job
from vjob.jobs.errors import InputError
from vjob.jobs.reporting.report import Say, check_libraries, find_folder, format_now, read_job
from vjob.jobs.runs.find import RunView, view_runs
from vjob.jobs.runs.listing import fit_lines, shorten_keys
from vjob.jobs.runs.resolved import read_resolved
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.job import JobState

if TYPE_CHECKING:
    from vjob.reports.page.comparison import Compared
    from vjob.reports.page.sections import ReportTable
    from vjob.reports.page.sweep_page import SweptRun


def compare(*jobs: JobLike) -> dict[str, Any]:
    """Return figures, settings and losses of two or more jobs, as in `vjob compare --json`.

    >>> found = vjob.compare("first", "last")
    >>> [job["name"] for job in found["jobs"]] == [one.name for one in vjob.runs(2)]
    True
    """
    folders = [str(job(one).folder) for one in jobs]
    return _build_json(choose_jobs(folders, Path.cwd()))


COMMIT = "commit"
"""Name of the commit among the settings, though it is not a key of a conf."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The jobs that the arguments name, in their order."""

    folders: tuple[tuple[Path, RunFolder | None], ...]
    sweeps: tuple[str, ...]
    """Names of sweeps among the arguments; their runs are among the folders."""


def choose_jobs(names: Sequence[str], here: Path) -> Chosen:
    """Return the folders of the JOBs and of the runs of sweeps; a word that names both a job and a
    sweep is taken as the job."""
    folders: list[tuple[Path, RunFolder | None]] = []
    sweeps = []
    for name in names:
        try:
            folders.append(find_folder(name, here))
        except InputError:
            runs = index.find_sweep(name)
            if not runs:
                raise
            sweeps.append(name)
            folders += [(run.path, run) for run in runs]
    if len(names) < 2 and not sweeps:
        raise InputError("give a sweep, or at least two jobs, such as: vjob compare 4711 last")
    check_libraries("plotly", "jinja2")
    return Chosen(folders=tuple(folders), sweeps=tuple(sweeps))


def _build_json(chosen: Chosen) -> dict[str, Any]:
    if chosen.sweeps:
        from vjob.reports.page.sweep_page import build_sweep_json

        return {"format": 1, "sweeps": chosen.sweeps, "runs": build_sweep_json(load_sweep(chosen))}
    from vjob.reports.page import comparison

    jobs = [_load(folder, run) for folder, run in chosen.folders]
    return {"format": 1, **comparison.build_json(jobs)}


def compare_jobs(
    names: Sequence[str],
    here: Path,
    say: Say,
    *,
    as_json: bool,
    page: Path | None,
    width: int | None = None,
) -> None:
    """Print the jobs' figures as a table of this width, or as JSON, or write them as a page."""
    chosen = choose_jobs(names, here)
    if as_json:
        say(json.dumps(_build_json(chosen), indent=1))
        if page is None:
            return
    if chosen.sweeps:
        _compare_sweep(chosen, here, say, page=page, width=width)
        return
    from vjob.reports.page import comparison

    if page is None:
        jobs = [_load(folder, run) for folder, run in chosen.folders]
        say("\n".join(_render_tables(comparison.build_comparison(jobs), width)).rstrip())
    else:
        write_atomic(here / page, _render_page(chosen))
        say(f"wrote {page}")


def render_compared(names: Sequence[str], here: Path) -> str:
    """Render the page that compares the named jobs."""
    return _render_page(choose_jobs(names, here))


def _render_page(chosen: Chosen) -> str:
    from vjob.reports.page import comparison

    jobs = [_load(folder, run) for folder, run in chosen.folders]
    return comparison.render_comparison(jobs, made_at=format_now())


def _render_tables(tables: Sequence[ReportTable], width: int | None) -> Iterator[str]:
    """Render the tables as lines; if they are too wide, jobs have numbers instead of names."""
    from vjob.reports.export.text import render_table

    def render(table: ReportTable) -> list[str]:
        return list(render_table(table, len(table.rows)))

    def fits(lines: Sequence[str]) -> bool:
        return width is None or max(map(len, lines)) <= width

    if not all(fits(render(table)) for table in tables):
        names = tables[0].columns[1:]
        numbers = [str(number) for number in range(1, len(names) + 1)]
        yield from ("JOBS", *map("  ".join, zip(numbers, names, strict=True)), "")
        tables = [replace(table, columns=("", *numbers)) for table in tables]
    for table in tables:
        lines = render(table)
        if not fits(lines):  # a long value, such as all arguments of a program
            lines = []
            for key, *values in table.rows:
                cells = map("  ".join, zip(table.columns[1:], values, strict=True))
                lines += [key, *(wrap_text(f"  {cell}", width) for cell in cells)]
        yield from (table.title.upper(), *lines, "")


def _compare_sweep(
    chosen: Chosen, here: Path, say: Say, *, page: Path | None, width: int | None
) -> None:
    from vjob.reports.page import sweep_page

    runs = load_sweep(chosen)
    keys = shorten_keys(dict.fromkeys(key for run in runs for key in run.values))
    if page is None:
        table = sweep_page.build_sweep_table(runs, keys)
        say("\n".join(fit_lines([tuple(map(str.upper, table.columns)), *table.rows], width)))
    else:
        name = " and ".join(chosen.sweeps)
        text = sweep_page.render_sweep(name, runs, keys, made_at=format_now())
        write_atomic(here / page, text)
        say(f"wrote {page}")


def load_sweep(chosen: Chosen) -> list[SweptRun]:
    """Load the runs of sweeps, and other jobs beside them, with one query to each scheduler."""
    from vjob.reports.page.sweep_page import SweptRun, find_figures

    views = {view.run.path: view for view in view_runs([run for _, run in chosen.folders if run])}
    swept = [view.record for view in views.values() if view.record.sweep in chosen.sweeps]
    keys = dict.fromkeys(key for record in swept for key in record.swept)
    found = []
    for folder, run in dict(chosen.folders).items():
        try:
            compared = _load(folder, run)
        except InputError:  # it never printed a line
            compared = None
        view = views.get(folder)
        found.append(
            SweptRun(
                name=folder.name,
                state=view.state if view is not None else "",
                message=_explain(view),
                values=_find_values(view, compared, tuple(keys), chosen.sweeps),
                figures=find_figures(compared),
            )
        )
    return found


def _explain(view: RunView | None) -> str:
    """Return the reason why a run failed; empty for others."""
    if view is None or view.state == JobState.COMPLETED.value:
        return ""
    return fold(view.record.message)


def _find_values(
    view: RunView | None, compared: Compared | None, keys: Sequence[str], sweeps: Sequence[str]
) -> Mapping[str, str]:
    """Return a run's values for the given keys: the values that the sweep gave it or, for a run
    outside the sweeps, those of its conf."""
    if view is not None and view.record.sweep in sweeps:
        return view.record.swept
    settings = compared.settings if compared is not None else {}
    places = {key: re.sub(r"\[(\d+)\]", r".\1", key) for key in keys}
    return {key: settings[place] for key, place in places.items() if place in settings}


def _load(folder: Path, run: RunFolder | None) -> Compared:
    from vjob.reports.page.comparison import Compared, flatten

    job, analysis = read_job(folder)
    conf = read_resolved(run) if run is not None else {}  # its secrets are redacted
    settings = flatten(conf) if conf else dict(job.job_info)
    if run is not None:
        settings |= _read_commit(run)
    return Compared(
        name=job.sources.name,
        job=job,
        analysis=analysis,
        settings=settings,
        has_conf=bool(conf),
    )


def _read_commit(run: RunFolder) -> dict[str, str]:
    """Return the commit as a setting, with a digest of uncommitted changes, which may differ."""
    record = read_record(run)
    commit = format_commit(record.code) if record is not None else ""
    try:
        mark = hashlib.sha256(read_bytes(run.code_diff)).hexdigest()[:6]
    except OSError:
        mark = ""
    return {COMMIT: f"{commit} ({mark})" if mark else commit} if commit else {}

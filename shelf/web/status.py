"""Serve `vjob status` as live pages: one job with nodes, GPUs and merged log, or all runs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.records.formatting import format_duration
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.model.run_row import RunRow
from vjob.jobs.monitor.model.snapshot import ENDED, Line, Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader
from vjob.jobs.monitor.readers.run_table import RunTable
from vjob.jobs.monitor.rules.base import is_plain_job
from vjob.jobs.monitor.rules.pace import find_left_s, find_pace_s
from vjob.jobs.reporting.report import find_folder, render_report
from vjob.reports.page.document import fill, read_scripts
from vjob.shelf.compare import render_compared
from vjob.shelf.screen.actions import JobActions
from vjob.shelf.view.formats import format_loss, format_seconds
from vjob.shelf.view.job import GPU_COLUMNS, NODE_COLUMNS, View, list_gpus
from vjob.shelf.view.runs import RUN_COLUMNS
from vjob.shelf.view.table import REST, Column, Key
from vjob.shelf.web.feed import Feed, JobReading
from vjob.shelf.web.server import LivePage

EVERY_S = 2.0
MOST_ROWS = 200
"""The most rows shown of nodes, GPUs and runs."""
SHOWN = ("node", "rank", "file", "text", "kind")
"""Fields shown of a log line."""
LIVE = "Live: it changes as the job runs."
OVER = "The job is over: nothing changes any more."
RUNS = "Live: all your runs, the newest first."
NAME = r"[A-Za-z0-9_][\w.-]*"
PATH = re.compile(rf"(?:run/(?P<run>{NAME})/?)?(?P<report>report)?")
"""Path of pages that a page links to."""
COMPARED = re.compile(rf"compare((?:/{NAME}){{2,8}})")
"""Path of the page that compares chosen runs."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A small chart of how a number changed."""

    points: str
    """Points of an SVG polyline in a box of 100 by 100."""
    words: str
    """Description for users who cannot see the chart."""


@dataclass(frozen=True, kw_only=True)
class PageCell:
    text: str
    key: Key = None
    """Key by which the page sorts rows."""
    share: float | None = None
    """Percentage, drawn as a bar below the text."""
    curve: Curve | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    cells: tuple[PageCell, ...]
    is_marked: bool = False
    target: str = ""
    """Link of the row's first cell."""
    name: str = ""
    """Name for comparing the run; empty if it cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Heading:
    title: str
    first_down: bool = False
    """True if sorting by this column begins with the greatest."""
    takes_rest: bool = False
    """True if its texts are long, and may wrap."""


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[Heading, ...]
    rows: tuple[Row, ...]
    note: str = ""
    is_searched: bool = False
    """True if the table has a search box."""


@dataclass(frozen=True, kw_only=True)
class StatusPage:
    """Parts of a page, top to bottom; empty ones are omitted."""

    title: str
    about: str = ""
    links: tuple[tuple[str, str], ...] = ()
    health: str = ""
    reason: str = ""
    evidence: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    advice: str = ""
    remarks: tuple[str, ...] = ()
    progress: tuple[tuple[str, str], ...] = ()
    share: float | None = None
    curves: tuple[tuple[str, Curve], ...] = ()
    tables: tuple[tuple[str, str, Table], ...] = ()
    has_log: bool = False


class StatusSource:
    """Reads one job, and the new lines of its logs."""

    def __init__(self, job: str, here: Path, links: tuple[tuple[str, str], ...]) -> None:
        self._reader = JudgedReader(open_reader(job, here))
        self._lines = JobActions(self._reader).lines
        self._links = links

    def make(self) -> JobReading:
        snapshot, verdict = self._reader.read()
        if snapshot.folder and not os.path.exists(snapshot.folder):
            raise InputError(f"{snapshot.folder} does not exist (any more)")
        over = verdict.health in ENDED and bool(snapshot.record_state or is_plain_job(snapshot))
        page = build_job_page(snapshot, verdict, self._links)
        lines = self._lines.read_new(None)
        return JobReading(
            parts={"page": render(page)},
            lines=[{name: getattr(line, name) for name in SHOWN} for line in lines],
            note=OVER if over else LIVE,
            is_over=over,
        )


class RunsSource:
    """Reads the rows of all runs."""

    def __init__(self) -> None:
        self._table = RunTable(warn=False)

    def make(self) -> JobReading:
        page = build_runs_page(self._table.read())
        return JobReading(parts={"page": render(page)}, note=self._table.problem or RUNS)


def open_job(job: str, here: Path, links: tuple[tuple[str, str], ...]) -> LivePage:
    """Return the live page of a job; raise InputError if there is none."""
    source = StatusSource(job, here, links)
    return _make_page(
        StatusPage(title=Path(job).name, links=links), Feed(source.make, every_s=EVERY_S)
    )


def open_runs() -> LivePage:
    """Return the live page of all runs."""
    return _make_page(StatusPage(title="runs"), Feed(RunsSource().make, every_s=EVERY_S))


def open_place(path: str, job: str | None, here: Path) -> LivePage | None:
    """Return the page of a link: `report` of `job`, `run/NAME`, its report, `compare/A/B`."""
    compared = COMPARED.fullmatch(path)
    if compared is not None:
        names = compared[1].split("/")[1:]
        return LivePage(document=lambda: render_compared(names, here).encode())
    found = PATH.fullmatch(path)
    name = found and (found["run"] or job)
    if found is None or name is None:
        return None
    if found["report"]:
        return open_report(name, here)
    return open_job(name, here, (("../../", "all runs"), ("report/", "report")))


def open_report(job: str, here: Path) -> LivePage:
    """Return a page that renders a job's report at each request; raise InputError if no job."""
    folder, run = find_folder(job, here)
    return LivePage(document=lambda: render_report(folder, run).encode())


def _make_page(empty: StatusPage, feed: Feed) -> LivePage:
    return LivePage(document=lambda: render(empty), files={"page.js": _read_scripts}, feed=feed)


def _read_scripts() -> bytes:
    return read_scripts(("theme.js", "live.js", "status.js")).encode()


def render(page: StatusPage) -> bytes:
    return fill("status.html.j2", page=page).encode()


def build_job_page(
    snapshot: Snapshot, verdict: Verdict, links: tuple[tuple[str, str], ...] = ()
) -> StatusPage:
    """Build the page from one snapshot of a job and its verdict."""
    view = View.make(snapshot, verdict)
    rows = sorted(view.rows, key=lambda row: (not row.is_culprit, not row.is_bad, row.index))
    is_bad = lambda row: row.is_culprit or row.is_bad  # noqa: E731
    nodes = build_table(NODE_COLUMNS, rows, "nodes", is_marked=is_bad)
    gpus = build_table(
        GPU_COLUMNS,
        list_gpus(rows),
        "GPUs",
        is_marked=lambda row: bool(row.gpu.held_down),
        curve=("recent use", lambda row: draw_curve(row.gpu.history, "%", full=(0.0, 100.0))),
    )
    tables = [("nodes", "Nodes", nodes), ("gpus", "GPUs", gpus)]
    points = snapshot.progress.points if snapshot.progress is not None else ()
    curves = (
        ("seconds a step", draw_curve([point.step_s for point in points], " s", flat=0.05)),
        ("loss", draw_curve([point.loss for point in points], flat=0.005)),
    )
    loss = snapshot.progress.loss if snapshot.progress is not None else None
    step = snapshot.progress.step if snapshot.progress is not None else None
    of = snapshot.progress.num_steps if snapshot.progress is not None else None
    going = snapshot if verdict.makes_steps else None
    pace_s, left_s = (None, None) if going is None else (find_pace_s(going), find_left_s(going))
    covers = snapshot.progress.pace_covers if snapshot.progress is not None else ""
    known = (
        ("step", f"{step} of {of}" if of else str(step)) if step is not None else None,
        ("a step takes", f"{format_seconds(pace_s)} s {covers}") if pace_s else None,
        ("time left", format_duration(left_s)) if left_s else None,
        ("loss", format_loss(loss)) if loss is not None else None,
        ("checkpoint", f"step {snapshot.checkpoint_step}")
        if snapshot.checkpoint_step is not None
        else None,
    )
    return StatusPage(
        title=Path(snapshot.run).name,
        about=_describe_job(snapshot),
        links=links,
        health=verdict.health.value,
        reason=verdict.reason,
        evidence=tuple(map(_format_line, verdict.evidence[:5])),
        facts=verdict.facts,
        advice=verdict.advice,
        remarks=verdict.remarks,
        progress=tuple(item for item in known if item is not None),
        share=min(100.0, round(100 * step / of, 1)) if step is not None and of else None,
        curves=tuple((name, curve) for name, curve in curves if curve is not None),
        tables=tuple(item for item in tables if item[2].rows),
        has_log=True,
    )


def _describe_job(snapshot: Snapshot) -> str:
    jobs = [f"{job.id} {job.state.lower()}" for job in snapshot.scheduler.jobs[:4]]
    words = [*jobs, snapshot.state.lower() if not jobs else "", snapshot.commit, snapshot.folder]
    if snapshot.scheduler.problem:
        words.insert(0, snapshot.scheduler.problem)
    if snapshot.attempt:
        words.insert(len(jobs), f"attempt {snapshot.attempt}")
    return " · ".join(filter(None, words))


def _format_line(line: Line) -> str:
    who = line.node + (f" rank {line.rank}" if line.rank is not None else "")
    return f"{who} | {line.text}" if who else line.text


def build_table(
    columns: Sequence[Column[Any]],
    rows: Sequence[Any],
    what: str,
    *,
    is_marked: Callable[[Any], bool],
    curve: tuple[str, Callable[[Any], Curve | None]] | None = None,
) -> Table:
    """Build a table of the first rows and the columns with values, the chart last."""
    used = [column for column in columns if column.is_used(rows)]
    count = len(rows) - MOST_ROWS
    shown = rows[:MOST_ROWS]
    curves = [curve[1](row) for row in shown] if curve is not None else []
    headings = [
        Heading(
            title=column.title,
            first_down=column.first_down,
            takes_rest=column.width == REST,
        )
        for column in used
    ]
    if curve is not None and any(curves):
        headings.append(Heading(title=curve[0]))
    return Table(
        columns=tuple(headings),
        rows=tuple(
            Row(
                cells=(
                    *(_make_cell(column, row) for column in used),
                    *(PageCell(text="", curve=one) for one in curves[at : at + 1] if any(curves)),
                ),
                is_marked=is_marked(row),
            )
            for at, row in enumerate(shown)
        ),
        note=f"and {count} more {what}" if count > 0 else "",
    )


def _make_cell(column: Column[Any], row: Any) -> PageCell:
    cell = column.show(row)
    return PageCell(text=cell.text, key=column.key(row))


def draw_curve(
    values: Sequence[float | None],
    unit: str = "",
    *,
    full: tuple[float, float] | None = None,
    flat: float = 0.0,
) -> Curve | None:
    """Draw the known values from left to right; None if fewer than two are known.

    The height spans `full`, else from the least to the greatest; values that differ by less than
    the share `flat` of the greatest are drawn in the middle.
    """
    known = [(at, y) for at, y in enumerate(values) if y is not None and math.isfinite(y)]
    if len(known) < 2:
        return None
    first, last = known[0][0], known[-1][0]
    numbers = [y for _, y in known]
    least, most = min(numbers), max(numbers)
    bottom, top = full or _spread(least, most, flat * abs(most))
    points = " ".join(
        f"{100 * (at - first) / (last - first):.1f},{96 - 92 * _find_height(y, bottom, top):.1f}"
        for at, y in known
    )
    show = format_seconds if unit == " s" else format_loss
    return Curve(points=points, words=f"{show(least)} to {show(most)}{unit}")


def _spread(least: float, most: float, span: float) -> tuple[float, float]:
    """Return bounds moved apart so that they span at least `span`."""
    more = max(0.0, span - (most - least)) / 2
    return least - more, most + more


def _find_height(value: float, bottom: float, top: float) -> float:
    return min(1.0, max(0.0, (value - bottom) / (top - bottom))) if top > bottom else 0.5


def build_runs_page(rows: Sequence[RunRow]) -> StatusPage:
    newest = list(reversed(rows))
    table = build_table(
        RUN_COLUMNS,
        newest,
        "runs",
        is_marked=_is_wrong,
        curve=("loss", lambda row: draw_curve(row.losses, flat=0.005)),
    )
    table = replace(
        table,
        rows=tuple(
            _finish_row(shown, row, table.columns)
            for shown, row in zip(table.rows, newest, strict=False)
        ),
        note=table.note if rows else "No runs yet: vjob submit conf.yaml",
        is_searched=bool(rows),
    )
    about = f"{sum(not row.is_over for row in rows)} of {len(rows)} are running"
    return StatusPage(title="runs", about=about, tables=(("runs", "Runs", table),))


def _finish_row(shown: Row, row: RunRow, headings: Sequence[Heading]) -> Row:
    """Add the link and a progress bar to a row."""
    target = _find_target(row)
    share = 100 * row.step / row.num_steps if row.step is not None and row.num_steps else None
    cells = tuple(
        replace(cell, share=min(100.0, share))
        if heading.title == "step" and share is not None
        else cell
        for heading, cell in zip(headings, shown.cells, strict=True)
    )
    return replace(shown, cells=cells, target=target, name=row.run if target else "")


def _is_wrong(row: RunRow) -> bool:
    return row.verdict is not None and not row.is_over and row.verdict.exit_code != 0


def _find_target(row: RunRow) -> str:
    return f"run/{row.run}/" if row.folder and PATH.fullmatch(f"run/{row.run}/") else ""

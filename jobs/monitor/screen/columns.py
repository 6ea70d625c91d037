"""The columns of the node table: what they show, how they sort, and which give way first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from rich.text import Text

from vjob.jobs.monitor.screen import paint
from vjob.jobs.monitor.screen.figures import show_age, show_seconds
from vjob.jobs.monitor.screen.marks import Marks
from vjob.jobs.monitor.screen.view import NodeRow

LATE_S = 120.0
"""A sign of life older than this is painted; whether it is wrong is the verdict's to say."""
HOT = 85.0
BAR_WIDTH = 5
REST = 0
"""Width of a column that takes what the others leave."""

Cell = tuple[str, Style]
Key = float | str | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column. Its width leaves room for the arrow of a sorted one."""

    title: str
    width: int
    place: int
    """Columns of the greatest place are left out first where they do not fit."""
    show: Callable[[NodeRow, Marks], Cell]
    key: Callable[[NodeRow], Key]
    """None sorts last, in either direction."""
    is_number: bool = False
    first_down: bool = False
    """Whether the greatest comes first when it is chosen."""


def _age_cell(age_s: float | None) -> Cell:
    is_late = age_s is not None and age_s > LATE_S
    return show_age(age_s), paint.BAD if is_late else paint.PLAIN


def _bar_cell(percent: float | None, marks: Marks) -> Cell:
    if percent is None:
        return "", paint.DIM
    style = paint.BAD if percent < 5 else paint.GOOD
    return f"{marks.bar(percent, BAR_WIDTH)} {percent:3.0f}%", style


def _temperature_cell(degrees: float | None, marks: Marks) -> Cell:
    if degrees is None:
        return "", paint.DIM
    return f"{degrees:.0f}{marks.degree}", paint.BAD if degrees >= HOT else paint.PLAIN


def _percent_cell(percent: float | None) -> Cell:
    if percent is None:
        return "", paint.DIM
    return f"{percent:.0f}%", paint.BAD if percent > 97 else paint.PLAIN


COLUMNS = (
    Column(
        title="node", width=12, place=0,
        show=lambda row, marks: (row.node.name, paint.STRONG if row.is_culprit else paint.PLAIN),
        key=lambda row: row.index,
    ),
    Column(
        title="group", width=8, place=11,
        show=lambda row, marks: (row.node.group, paint.PLAIN),
        key=lambda row: row.node.group or None,
    ),
    Column(
        title="ranks", width=9, place=9,
        show=lambda row, marks: (row.ranks, paint.PLAIN),
        key=lambda row: min(row.node.ranks, default=None),
    ),
    Column(
        title="stage", width=5, place=8,
        show=lambda row, marks: (row.stages, paint.PLAIN), key=lambda row: row.stages or None,
    ),
    Column(
        title="state", width=16, place=1,
        show=lambda row, marks: (row.state, paint.BAD if row.is_bad else paint.PLAIN),
        key=lambda row: f"{not row.is_bad}{row.state}" if row.state else None,
    ),
    Column(
        title="beat", width=5, place=4, is_number=True, first_down=True,
        show=lambda row, marks: _age_cell(row.beat_age_s), key=lambda row: row.beat_age_s,
    ),
    Column(
        title="log", width=4, place=6, is_number=True, first_down=True,
        show=lambda row, marks: _age_cell(row.log_age_s), key=lambda row: row.log_age_s,
    ),
    Column(
        title="step", width=7, place=2, is_number=True,
        show=lambda row, marks: ("" if row.step is None else str(row.step), paint.PLAIN),
        key=lambda row: row.step,
    ),
    Column(
        title="s/step", width=7, place=7, is_number=True, first_down=True,
        show=lambda row, marks: (show_seconds(row.step_s), paint.PLAIN), key=lambda row: row.step_s,
    ),
    Column(
        title="GPU", width=10, place=3,
        show=lambda row, marks: _bar_cell(row.utilization, marks), key=lambda row: row.utilization,
    ),
    Column(
        title="CPU", width=10, place=3,
        show=lambda row, marks: _bar_cell(row.cpu_percent, marks), key=lambda row: row.cpu_percent,
    ),
    Column(
        title="mem", width=4, place=10, is_number=True, first_down=True,
        show=lambda row, marks: _percent_cell(row.memory), key=lambda row: row.memory,
    ),
    Column(
        title="temp", width=5, place=12, is_number=True, first_down=True,
        show=lambda row, marks: _temperature_cell(row.temperature, marks),
        key=lambda row: row.temperature,
    ),
    Column(
        title="error", width=REST, place=5,
        show=lambda row, marks: (row.error, paint.BAD), key=lambda row: row.error or None,
    ),
)  # fmt: skip
LEAST_REST = 12
MARGIN = 2
"""Two signs before a row: the cursor's and the culprit's."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A column where it stands on the screen."""

    column: Column
    start: int
    width: int


def place_columns(rows: Sequence[NodeRow], width: int, marks: Marks) -> list[Placed]:
    """The columns that fit, as wide as they need; those that nothing is in give way first."""
    used = [column for column in COLUMNS if column.place == 0 or _has_any(column, rows)]
    widths = {column.title: _find_width(column, rows, marks) for column in used}
    while len(used) > 1 and sum(widths[c.title] + 1 for c in used) + MARGIN > width:
        used.remove(max(used, key=lambda column: column.place))
    rest = width - MARGIN - sum(widths[column.title] + 1 for column in used)
    placed, start = [], MARGIN
    for column in used:
        own = widths[column.title] + (max(0, rest) if column.width == REST else 0)
        own = min(own, max(1, width - start))
        placed.append(Placed(column=column, start=start, width=own))
        start += own + 1
    return placed


def _has_any(column: Column, rows: Sequence[NodeRow]) -> bool:
    return not rows or any(column.key(row) is not None for row in rows)


def _find_width(column: Column, rows: Sequence[NodeRow], marks: Marks) -> int:
    """Of text as long as the longest, of numbers as it is set."""
    if column.width == REST:
        return LEAST_REST
    if column.is_number or column.title in ("GPU", "CPU"):
        return column.width
    longest = max((len(column.show(row, marks)[0]) for row in rows), default=column.width)
    return max(len(column.title) + 1, min(longest, 2 * column.width))


def render_titles(placed: Sequence[Placed], sorted_by: str, is_down: bool, marks: Marks) -> Text:
    """The line above the rows; the column that rows are sorted by has an arrow."""
    line = Text(" " * MARGIN, style=paint.TITLE)
    for item in placed:
        title = item.column.title
        if title == sorted_by:
            title += marks.down if is_down else marks.up
        shown = title.rjust(item.width) if item.column.is_number else title.ljust(item.width)
        line.append(shown[: item.width] + " ")
    return line


def render_row(row: NodeRow, placed: Sequence[Placed], *, is_here: bool, marks: Marks) -> Text:
    """One node."""
    line = Text(style=paint.HERE if is_here else paint.PLAIN)
    line.append(marks.here if is_here else " ")
    line.append(marks.culprit if row.is_culprit else " ", paint.BAD)
    for item in placed:
        text, style = item.column.show(row, marks)
        shown = marks.fit(marks.plain(text), item.width)
        line.append(
            shown.rjust(item.width) if item.column.is_number else shown.ljust(item.width), style
        )
        line.append(" ")
    return line


def sort_rows(rows: Sequence[NodeRow], title: str, is_down: bool) -> list[NodeRow]:
    """By a column; rows of which nothing is known last, equal ones in the snapshot's order."""
    column = next(column for column in COLUMNS if column.title == title)
    keyed = [(column.key(row), row) for row in rows]
    known = [(key, row) for key, row in keyed if key is not None]
    known.sort(key=_first, reverse=is_down)
    return [row for _, row in known] + [row for key, row in keyed if key is None]


def _first(pair: tuple[Any, NodeRow]) -> Any:
    return pair[0]

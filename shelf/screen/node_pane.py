"""Node table: its columns, and the pane that shows one row a node."""

from __future__ import annotations

from rich.text import Text

from vjob.shelf.screen import theme
from vjob.shelf.screen.table_pane import REST, Cell, Column, Flag, TablePane
from vjob.shelf.screen.theme import Marks, format_age, format_seconds
from vjob.shelf.screen.view import NodeRow

LATE_S = 120.0
"""A sign of life older than this is painted; whether it is wrong is the verdict's to say."""
HOT = 85.0
BAR_WIDTH = 5


def _age_cell(age_s: float | None) -> Cell:
    is_late = age_s is not None and age_s > LATE_S
    return format_age(age_s), theme.BAD if is_late else theme.PLAIN


def _bar_cell(percent: float | None, marks: Marks) -> Cell:
    if percent is None:
        return "", theme.DIM
    style = theme.BAD if percent < 5 else theme.GOOD
    return f"{marks.bar(percent, BAR_WIDTH)} {percent:3.0f}%", style


def _temperature_cell(degrees: float | None, marks: Marks) -> Cell:
    if degrees is None:
        return "", theme.DIM
    return f"{degrees:.0f}{marks.degree}", theme.BAD if degrees >= HOT else theme.PLAIN


def _percent_cell(percent: float | None) -> Cell:
    if percent is None:
        return "", theme.DIM
    return f"{percent:.0f}%", theme.BAD if percent > 97 else theme.PLAIN


COLUMNS = (
    Column[NodeRow](
        title="node", width=12, place=0,
        show=lambda row, marks: (row.node.name, theme.STRONG if row.is_culprit else theme.PLAIN),
        key=lambda row: row.index,
    ),
    Column[NodeRow](
        title="group", width=8, place=11,
        show=lambda row, marks: (row.node.group, theme.PLAIN),
        key=lambda row: row.node.group or None,
    ),
    Column[NodeRow](
        title="ranks", width=9, place=9,
        show=lambda row, marks: (row.ranks, theme.PLAIN),
        key=lambda row: min(row.node.ranks, default=None),
    ),
    Column[NodeRow](
        title="stage", width=5, place=8,
        show=lambda row, marks: (row.stages, theme.PLAIN), key=lambda row: row.stages or None,
    ),
    Column[NodeRow](
        title="state", width=16, place=1,
        show=lambda row, marks: (row.state, theme.BAD if row.is_bad else theme.PLAIN),
        key=lambda row: f"{not row.is_bad}{row.state}" if row.state else None,
    ),
    Column[NodeRow](
        title="beat", width=5, place=4, is_number=True, first_down=True,
        show=lambda row, marks: _age_cell(row.beat_age_s), key=lambda row: row.beat_age_s,
    ),
    Column[NodeRow](
        title="log", width=4, place=6, is_number=True, first_down=True,
        show=lambda row, marks: _age_cell(row.log_age_s), key=lambda row: row.log_age_s,
    ),
    Column[NodeRow](
        title="step", width=7, place=2, is_number=True,
        show=lambda row, marks: ("" if row.step is None else str(row.step), theme.PLAIN),
        key=lambda row: row.step,
    ),
    Column[NodeRow](
        title="s/step", width=7, place=7, is_number=True, first_down=True,
        show=lambda row, marks: (format_seconds(row.step_s), theme.PLAIN),
        key=lambda row: row.step_s,
    ),
    Column[NodeRow](
        title="GPU", width=10, place=3, is_fixed=True,
        show=lambda row, marks: _bar_cell(row.utilization, marks), key=lambda row: row.utilization,
    ),
    Column[NodeRow](
        title="CPU", width=10, place=3, is_fixed=True,
        show=lambda row, marks: _bar_cell(row.cpu_percent, marks), key=lambda row: row.cpu_percent,
    ),
    Column[NodeRow](
        title="mem", width=4, place=10, is_number=True, first_down=True,
        show=lambda row, marks: _percent_cell(row.memory), key=lambda row: row.memory,
    ),
    Column[NodeRow](
        title="temp", width=5, place=12, is_number=True, first_down=True,
        show=lambda row, marks: _temperature_cell(row.temperature, marks),
        key=lambda row: row.temperature,
    ),
    Column[NodeRow](
        title="error", width=REST, place=5,
        show=lambda row, marks: (row.error, theme.BAD), key=lambda row: row.error or None,
    ),
)  # fmt: skip


class NodePane(TablePane[NodeRow]):
    """One row a node; until the user moves the cursor it stands on the culprit."""

    columns = COLUMNS

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self._num_planned: int | None = None

    def name_row(self, row: NodeRow) -> str:
        return row.node.name

    def find_words(self, row: NodeRow) -> str:
        return row.words

    def flag_row(self, row: NodeRow) -> Flag:
        return (self.marks.culprit, theme.BAD) if row.is_culprit else (" ", theme.BAD)

    def take(self, rows: tuple[NodeRow, ...], num_planned: int | None) -> None:
        """Rows of a new look."""
        self._num_planned = num_planned
        culprit = next((row.node.name for row in rows if row.is_culprit), None)
        self.take_rows(rows, culprit)

    def make_heading(self) -> Text:
        title = self.begin_title("nodes")
        planned, have = self._num_planned, len(self.all_rows)
        missing = f"{have:,} of {planned:,}" if planned and planned != have else f"{have:,}"
        return title.append(f"  {missing}", theme.PLAIN)

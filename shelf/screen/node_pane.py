"""Node table: a pane with a row for each node."""

from __future__ import annotations

from rich.text import Text

from vjob.shelf.screen import theme
from vjob.shelf.screen.table_pane import Flag, TablePane
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.job import NODE_COLUMNS, NodeRow


class NodePane(TablePane[NodeRow]):
    """Node table whose cursor starts on the node at fault, until the user moves it."""

    columns = NODE_COLUMNS

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self._num_planned: int | None = None

    def name_row(self, row: NodeRow) -> str:
        return row.node.name

    def render_words(self, row: NodeRow) -> str:
        return row.words

    def flag_row(self, row: NodeRow) -> Flag:
        return (self.marks.culprit, theme.BAD) if row.is_culprit else (" ", theme.BAD)

    def take(self, rows: tuple[NodeRow, ...], num_planned: int | None) -> None:
        """Show the rows of a new snapshot."""
        self._num_planned = num_planned
        culprit = next((row.node.name for row in rows if row.is_culprit), None)
        self.take_rows(rows, culprit)

    def make_heading(self) -> Text:
        title = self.begin_title("nodes")
        planned, have = self._num_planned, len(self.all_rows)
        missing = f"{have:,} of {planned:,}" if planned and planned != have else f"{have:,}"
        return title.append(f"  {missing}", theme.PLAIN)

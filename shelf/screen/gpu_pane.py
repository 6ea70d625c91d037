"""Pane with the GPUs of the chosen node, one in each line, with a short history."""

from __future__ import annotations

from rich.text import Text

from vjob.jobs.monitor.model.snapshot import Gpu
from vjob.shelf.screen import theme
from vjob.shelf.screen.pane import ScrollPane
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.formats import format_age, format_memory
from vjob.shelf.view.job import NodeRow, list_troubles

BAR_WIDTH = 10
HISTORY = 30
LATE_S = 60.0


class GpuPane(ScrollPane):
    """Bars for the GPUs of one node."""

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self._row: NodeRow | None = None
        self._now = 0.0
        self._are_there = True

    def take(self, row: NodeRow | None, now: float, num_gpus: int | None) -> None:
        """Show a node; `num_gpus` is the number that the whole job asks for, if known."""
        self._row, self._now, self._are_there = row, now, num_gpus != 0
        self.show()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self._row.node.gpus if self._row else ()

    @property
    def num_rows(self) -> int:
        return len(self.gpus)

    def make_title(self, y: int) -> Text:
        title = self.begin_title("GPUs")
        row = self._row
        if row is None:
            return title
        title.append(f" of {self.marks.plain(row.node.name)}", theme.PLAIN)
        names = {gpu.name for gpu in self.gpus if gpu.name}
        if len(names) == 1:
            title.append(f"  {self.marks.plain(names.pop())}", theme.PLAIN)
        if not self.gpus:
            title.append("  no samples yet" if self._are_there else "  none asked for", theme.DIM)
        elif row.node.gpus_at is not None and self._now - row.node.gpus_at > LATE_S:
            title.append(f"  sampled {format_age(self._now - row.node.gpus_at)} ago", theme.WARM)
        if row.node.cpu_percent is not None:
            title.append(f"  processors {row.node.cpu_percent:.0f}%", theme.DIM)
        if row.node.memory_used_mb is not None:
            memory = format_memory(row.node.memory_used_mb, row.node.memory_total_mb)
            title.append(f"  memory {memory}", theme.DIM)
        title.append(self.format_part(), theme.DIM)
        return title

    def make_row(self, number: int) -> Text:
        gpu = self.gpus[number]
        line = Text(f"  {self.marks.plain(gpu.index):>3} ", style=theme.PLAIN)
        if gpu.utilization is None:
            line.append("no figure".ljust(BAR_WIDTH + 5), theme.DIM)
        else:
            style = theme.BAD if gpu.utilization < 5 else theme.GOOD
            line.append(self.marks.bar(gpu.utilization, BAR_WIDTH), style)
            line.append(f" {gpu.utilization:3.0f}%")
        line.append(f"  {format_memory(gpu.memory_used_mb, gpu.memory_total_mb):<14}")
        line.append(self._format_heat(gpu))
        if gpu.history:
            line.append("  " + self.marks.spark(gpu.history, HISTORY, top=100.0), theme.GOOD)
        for words in list_troubles(gpu):
            line.append(f"  {self.marks.plain(words)}", theme.BAD)
        return line

    def _format_heat(self, gpu: Gpu) -> str:
        heat = "" if gpu.temperature is None else f"{gpu.temperature:.0f}{self.marks.degree}"
        power = "" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        return f"{heat:>4} {power:>6}"

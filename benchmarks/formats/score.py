"""Verdicts on a reading of a log: each figure is right, not known or wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.formats.model import Format, Negative, Truth
from benchmarks.formats.reading import Reading, read_lines, read_status

RIGHT, UNKNOWN, WRONG = "right", "not known", "wrong"
FIGURES = ("step", "total", "loss", "val_loss")
MOST_SHOWN = 8
REL = 1e-3
"""Losses that are nearer than this are the same."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A format: verdicts by figure, as the reader of lines and as `vjob status` has it."""

    name: str
    by_lines: Mapping[str, str]
    by_status: Mapping[str, str]
    note: str
    """Figures that were wrong, beside the right ones."""

    @property
    def is_right(self) -> bool:
        """Step and total."""
        return self.by_lines["step"] == self.by_lines["total"] == RIGHT

    @property
    def has_all(self) -> bool:
        return set(self.by_lines.values()) == {RIGHT}

    def render(self) -> str:
        """The cells of a table behind the name."""
        return " | ".join([*(self.by_lines[figure] for figure in FIGURES), self.note])


def judge(reading: Reading, truth: Truth) -> dict[str, str]:
    """The verdict on each figure."""
    fitting = [count for count in truth.counts if reading.step in count.steps]
    is_epoch = reading.unit == "epoch" and reading.step in truth.epochs
    if reading.step is None or (not truth.steps and is_epoch):
        step = UNKNOWN if truth.steps else RIGHT
    elif not fitting and is_epoch:
        step = UNKNOWN
    else:
        step = RIGHT if fitting else WRONG
    totals = {total for count in fitting or truth.counts for total in count.totals}
    if reading.total is None:
        total = RIGHT if None in totals else UNKNOWN
    else:
        total = RIGHT if reading.total in totals else WRONG
    loss = _judge_loss(reading.loss, truth.losses)
    val_loss = _judge_loss(reading.val_loss, truth.val_losses)
    return {"step": step, "total": total, "loss": loss, "val_loss": val_loss}


def _judge_loss(said: float | None, true: Sequence[float]) -> str:
    if said is None:
        return UNKNOWN if true else RIGHT
    return RIGHT if any(math.isclose(said, loss, rel_tol=REL) for loss in true) else WRONG


def score_format(item: Format, seed: int = 0) -> Row:
    log, truth = item.make(seed)
    lines, status = read_lines(log), read_status(log)
    by_lines = judge(lines, truth)
    by_status = judge(replace(status, val_loss=lines.val_loss), truth)
    notes = [_describe(lines, truth, by_lines, "")]
    if by_status != by_lines:
        notes.append(_describe(status, truth, by_status, "status: "))
    note = "; ".join(filter(None, notes))
    return Row(name=item.name, by_lines=by_lines, by_status=by_status, note=note)


def find_false_steps(item: Negative, seed: int = 0) -> str:
    """Return the step that was read in a log of no training; empty if there was none."""
    log = item.make(seed)
    for reading in (read_lines(log), read_status(log)):
        if reading.step is not None:
            return f"step {reading.step}, total {reading.total}, loss {reading.loss}"
    return ""


def count_verdicts(rows: Sequence[Row], figure: str) -> str:
    found = Counter(row.by_lines[figure] for row in rows)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in (RIGHT, UNKNOWN, WRONG))


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of a half, as they are kept for the page."""
    return {
        "formats": len(rows),
        "step and total right": sum(row.is_right for row in rows),
        **{figure: count_verdicts(rows, figure) for figure in FIGURES},
        "misses": {row.name: row.render() for row in rows if row.note or not row.has_all},
    }


def _describe(reading: Reading, truth: Truth, verdicts: Mapping[str, str], who: str) -> str:
    """The figures that are not right, and what they should be."""
    true = {
        "step": [count.steps for count in truth.counts],
        "total": [count.totals for count in truth.counts],
        "loss": truth.losses[:2],
        "val_loss": truth.val_losses,
    }
    parts = [
        f"{who}{figure} {getattr(reading, figure)}, true {_shorten(true[figure])}"
        for figure in FIGURES
        if verdicts[figure] == WRONG
    ]
    return "; ".join(parts)


def _shorten(values: Any) -> str:
    flat = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    if len(flat) > MOST_SHOWN:
        return f"{flat[0]} to {flat[-1]}"
    return " or ".join(dict.fromkeys("none" if one is None else f"{one}" for one in flat)) or "none"

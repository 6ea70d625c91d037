"""Define the columns of the list of all runs."""

from __future__ import annotations

from vjob.jobs.monitor.model.run_row import RunRow, format_step
from vjob.shelf.view.formats import format_age, format_coarse_duration, format_seconds
from vjob.shelf.view.table import REST, Cell, Column, Tone


def _show_health(row: RunRow) -> Cell:
    if row.verdict is None:
        return Cell(row.state, Tone.DIM)
    return Cell(row.verdict.health.value, row.verdict.health)


def _find_share(row: RunRow) -> float | None:
    """Return, as a sort key, the share of a run that is done; runs without a known end sort
    highest."""
    return row.step if row.step is None or not row.num_steps else row.step / row.num_steps


RUN_COLUMNS = (
    Column[RunRow](
        title="run", width=14, place=0,
        show=lambda row: Cell(row.run), key=lambda row: row.submitted,
        first_down=True,
    ),
    Column[RunRow](
        title="verdict", width=9, place=1, show=_show_health, key=lambda row: row.health,
    ),
    Column[RunRow](
        title="step", width=7, place=2,
        show=lambda row: Cell(format_step(row).replace("-", "")),
        key=lambda row: _find_share(row), first_down=True,
    ),
    Column[RunRow](
        title="s/step", width=7, place=5, is_number=True, first_down=True,
        show=lambda row: Cell(format_seconds(row.step_s)),
        key=lambda row: row.step_s,
    ),
    Column[RunRow](
        title="left", width=12, place=3, is_number=True,
        show=lambda row: Cell(format_coarse_duration(row.left_s)), key=lambda row: row.left_s,
    ),
    Column[RunRow](
        title="age", width=4, place=4, is_number=True,
        show=lambda row: Cell(format_age(row.age_s)), key=lambda row: row.age_s,
    ),
    Column[RunRow](
        title="state", width=10, place=6,
        show=lambda row: Cell(row.state, Tone.DIM), key=lambda row: row.state,
    ),
    Column[RunRow](
        title="job", width=8, place=7,
        show=lambda row: Cell(",".join(row.jobs), Tone.DIM),
        key=lambda row: ",".join(job.zfill(12) for job in row.jobs) or None,
    ),
    Column[RunRow](
        title="reason", width=REST, place=8,
        show=lambda row: Cell(row.message, Tone.DIM), key=lambda row: row.message or None,
    ),
)  # fmt: skip

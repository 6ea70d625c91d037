"""One run in the list of all runs, and the list as text: for a pipe, or a terminal without keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_core.records.formatting import format_duration, format_pace, wrap_columns
from varuna_core.records.logs.tail import clean_name, fold
from vjob.jobs.monitor.model.snapshot import Health, Verdict

HEAD = ("JOB", "STATE", "STEP", "A STEP", "LEFT", "AGE", "RUN", "")


ENDED: Mapping[str, Health] = {
    "COMPLETED": Health.DONE,
    "CANCELLED": Health.CANCELLED,
    "REFUSED": Health.REFUSED,
}
"""Final states of a run that do not mean DEAD, with their health."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run; None for what is not known."""

    run: str
    name: str
    """The run's name in its conf."""
    folder: str
    """The run folder, empty if it was removed and the job goes on."""
    jobs: tuple[str, ...]
    state: str
    """The scheduler's state, or how the run ended."""
    is_over: bool
    submitted: float | None
    age_s: float | None
    verdict: Verdict | None
    """The verdict on the run; None until the run was judged."""
    message: str
    """The verdict's reason, or the record's message."""
    step: int | None = None
    num_steps: int | None = None
    step_s: float | None = None
    left_s: float | None = None
    loss: float | None = None
    losses: tuple[float | None, ...] = ()
    """Losses of the run's newest steps, for a small curve."""
    attempt: int | None = None
    is_read: bool = True
    """False if the run's logs, and so its steps, were left for a later refresh."""

    @property
    def target(self) -> str:
        """The word that names the run for commands: its folder or, without one, its first job."""
        return self.folder or ",".join(self.jobs[:1])

    @property
    def health(self) -> str:
        """The health of the verdict; without a verdict, that for how the run ended."""
        if self.verdict is not None:
            return self.verdict.health.value
        ended = ENDED.get(self.state, Health.DEAD) if self.is_over else Health.UNKNOWN
        return ended.value

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON: `state` is the verdict's health, `job_state` the scheduler's."""
        verdict = self.verdict
        return {
            "run": self.run,
            "name": self.name,
            "jobs": list(self.jobs),
            "state": self.health,
            "job_state": self.state,
            "submitted": self.submitted,
            "step": self.step,
            "num_steps": self.num_steps,
            "step_s": self.step_s,
            "left_s": self.left_s,
            "is_read": self.is_read,
            "message": self.message,
            "advice": verdict.advice if verdict is not None else "",
            "exit_code": verdict.exit_code if verdict is not None else 0,
            "folder": self.folder,
        }


def format_step(row: RunRow) -> str:
    """Format a run's step: `120/1000`, `120`, a dash if not known, `?` if no log was read."""
    if row.step is None:
        return "-" if row.is_read else "?"
    return f"{row.step}/{row.num_steps}" if row.num_steps else str(row.step)


def _format_time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def render_rows(rows: Sequence[RunRow], width: int) -> str:
    """Render a table of this width, with each reason in full: beside its run, or below it if there
    is too little room."""
    if not rows:
        return "no runs yet; `vjob submit conf.yaml` makes one"
    cells: list[tuple[str, ...]] = [HEAD]
    for row in rows:
        jobs = ",".join(row.jobs) or "-"
        pace = "-" if row.step_s is None else format_pace(row.step_s)
        times = (pace, *map(_format_time, (row.left_s, row.age_s)))
        message = fold(row.message)
        cells.append((jobs, row.health, format_step(row), *times, clean_name(row.run), message))
    num_unread = sum(not row.is_read for row in rows)
    lines = wrap_columns(cells, width)
    if num_unread:
        whose = "run" if num_unread == 1 else f"{num_unread} runs"
        said = f"the logs of the {whose} marked ? were not read in time"
        lines.append(f"{said}; `vjob status RUN` reads them")
    return "\n".join(lines)

"""List every run of this user, one in a line: `vjob list`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from varuna_core.facts.hang import parse_hang
from varuna_core.facts.sentences import describe_hang
from varuna_core.hang.signs import read_hang
from varuna_core.records.files import read_json
from varuna_core.records.formatting import align_columns, wrap_columns
from varuna_core.records.logs.tail import clean, clean_name, fold
from varuna_core.records.record import ENDED
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.runs.find import RunView, find_removed, view_runs
from vjob.jobs.runs.outcome import find_own_checkpoint
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.job import JobState

MOST_NAMED = 5
"""The most sweeps named if one is not known."""


def list_runs(limit: int | None) -> list[dict[str, Any]]:
    """Return runs as plain rows, newest last."""
    index.check_readable()
    runs = index.list_runs()
    rows = map(_make_row, view_runs(runs[-limit:] if limit else runs))
    return [*rows, *_list_removed()]


def _make_row(view: RunView, **more: Any) -> dict[str, Any]:
    """Return a run as a plain row, with `more` after its state."""
    return {
        "run": view.record.run,
        "jobs": [job.id for job in view.record.jobs],
        "state": view.state,
        **more,
        "submitted": view.record.submitted,
        "message": choose_message(view),
        "folder": str(view.run.path),
    }


def choose_message(view: RunView) -> str:
    """Return the record's message. If the run did not end well, or has no message, add a hang that
    has not passed, and the checkpoint from which a new submit would continue."""
    said, is_ended = view.record.message, view.record.state == ENDED
    if said and (not is_ended or view.state == JobState.COMPLETED.value):
        return said
    attempts = view.run.attempts() if view.is_under_way else []
    hang = read_hang(attempts[-1]) if attempts else None
    step = find_own_checkpoint(view.run) if is_ended else None
    parts = [said] if said else []
    maybe = parse_hang(read_json(attempts[-1].hanging)) if attempts and is_ended else None
    if hang is not None and hang.until is None:
        parts.append(f"{'hung' if is_ended else 'hangs'}: {describe_hang(hang)}")
    elif hang is None and maybe is not None:
        parts.append(f"may have hung: {describe_hang(maybe)}")
    if step is not None:
        parts.append(f"submit again to continue from step {step}")
    return "; ".join(parts)


def _list_removed() -> list[dict[str, Any]]:
    """Return rows for the runs whose folders are gone and whose jobs go on."""
    return [
        {
            "run": removed.run,
            "jobs": removed.jobs,
            "state": "UNKNOWN",
            "submitted": None,
            "message": removed.explain(),
            "folder": "",
        }
        for removed in reversed(find_removed(index.list_removed(None)))
    ]


def find_sweep(name: str) -> list[RunFolder]:
    """Return the runs of a sweep; raise InputError if no sweep has this name."""
    index.check_readable()
    runs = index.find_sweep(name)
    if not runs:
        known = ", ".join(index.list_sweeps()[-MOST_NAMED:])
        said = f"the last are {known}" if known else "`vjob submit --sweep` makes a sweep"
        raise InputError(f"no sweep {name!r} is known: {said}")
    return runs


def list_sweep(name: str) -> list[dict[str, Any]]:
    """Return the runs of a sweep as plain rows, with their values of its keys."""
    views = view_runs(find_sweep(name))
    return [_make_row(view, swept=dict(view.record.swept)) for view in views]


def render_sweep(rows: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Render a table with a column for each key of the sweep."""
    keys = dict.fromkeys(key for row in rows for key in row["swept"])
    cells = [("JOB", "STATE", "RUN", *shorten_keys(keys).values(), "")]
    for row in rows:
        values = (clean(row["swept"].get(key, "-")) for key in keys)
        message = fold(str(row["message"]))
        cells.append((",".join(row["jobs"]) or "-", row["state"], row["run"], *values, message))
    return "\n".join(fit_lines(cells, width))


def shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Shorten each key to the fewest of its last parts that keep it unique: lr, optimizer.name."""
    split = {key: key.split(".") for key in keys}
    found = {}
    for key, parts in split.items():
        ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
        others = [other for other in split if other != key]
        found[key] = next(
            (x for x in ends if not any(f".{o}".endswith(f".{x}") for o in others)), key
        )
    return found


def render(rows: list[dict[str, Any]], width: int | None = None) -> str:
    """Render a table, or advice if it is empty; messages wrap at `width`, if given."""
    if not rows:
        return "no runs yet; `vjob submit conf.yaml` makes one"
    cells = [("JOB", "STATE", "SUBMITTED", "RUN", "")]
    for row in rows:
        when = "-"
        if row["submitted"] is not None:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["submitted"]))
        message = fold(str(row["message"]))
        cells.append((",".join(row["jobs"]) or "-", row["state"], when, row["run"], message))
    return "\n".join(fit_lines(cells, width))


def fit_lines(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the lines of a table, whose last column wraps at `width`, if given."""
    cells = [[clean_name(cell) for cell in row] for row in cells]
    return align_columns(cells) if width is None else wrap_columns(cells, width)


def known_jobs() -> list[str]:
    """Return words that name a run, for shell completion, without asking a scheduler."""
    from varuna_core.records.record import read_record

    words = {"last"}
    for run in index.list_runs():
        record = read_record(run)
        if record is not None:
            words |= {record.run, record.name, *(job.id for job in record.jobs)}
    return sorted(words)

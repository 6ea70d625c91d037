"""Offer a job's tables to Python as `JobTables`, and write them as CSV or Parquet files.

The columns are those of `schema.TABLES`. A table is built at its first use from files that were
read once; later output of a running job is not included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union

import pandas as pd

from varuna_core.records.files import list_files, read_json
from varuna_core.records.runfolder import AttemptFolder
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.measures import Analysis, analyse, list_ranks
from vjob.reports.export.schema import KIND_COLUMNS, TABLES, add_seconds, fit_table
from vjob.reports.load import tables as loaded
from vjob.reports.load.log_lines import read_log_lines
from vjob.reports.load.tables import Job, choose_more
from vjob.reports.load.trace_reader import MOST_EVENTS, read_events, stream_events

if TYPE_CHECKING:
    from pyarrow import parquet


class HasFolder(Protocol):
    """Protocol of `vjob.job`'s jobs: anything with a run folder."""

    @property
    def folder(self) -> Path: ...


JobLike = Union["JobTables", HasFolder, str, "os.PathLike[str]"]
"""Loaded tables, a job, or the path of a run folder, of a folder of logs, or of one log."""


class JobTables(Mapping[str, pd.DataFrame]):
    """The tables of one job by name, as items and as attributes: `job["steps"]`, `job.steps`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._made: dict[str, pd.DataFrame] = {}

    @property
    def name(self) -> str:
        """Name of the run folder, the folder of logs, or the log."""
        return self.job.sources.name

    @cached_property
    def analysis(self) -> Analysis:
        """The figures of the report."""
        return analyse(self.job)

    def describe(self, name: str) -> pd.DataFrame:
        """Return type, unit and meaning of each column of a table."""
        rows = [(c.name, c.type, c.unit, c.doc) for c in TABLES[name].columns]
        return pd.DataFrame(rows, columns=["column", "type", "unit", "meaning"]).set_index("column")

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._made:
            self._made[name] = fit_table(name, MAKERS[name](self.job, self.analysis))
        return self._made[name]

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name not in TABLES:
            raise AttributeError(f"there is no table {name!r}: {', '.join(TABLES)}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(TABLES)

    def __len__(self) -> int:
        return len(TABLES)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *TABLES})

    def __repr__(self) -> str:
        return f"<tables of {self.name}: {', '.join(TABLES)}>"

    __hash__ = object.__hash__
    """Hash by identity: tables are never compared by content."""

    def __eq__(self, other: object) -> bool:
        return self is other


def load_job(job: JobLike) -> JobTables:
    """Read a job's files once. Tables without data are empty; raise SourceError if no files of a
    job are found.

    >>> job = vjob.reports.load_job("log/gpt-20260101-120000")
    >>> job.steps.took_s.median()
    0.0421
    """
    if isinstance(job, JobTables):
        return job
    path = Path(job) if isinstance(job, (str, os.PathLike)) else job.folder
    return JobTables(loaded.load_job(path.expanduser()))


# Makers: raw frames of `load` and `analysis` to the columns of the schema.


def _make_attempts(job: Job, analysis: Analysis) -> pd.DataFrame:
    rows = [
        {
            "attempt": attempt.label,
            "started": attempt.started,
            "ended": attempt.ended,
            "first_step": attempt.first_step,
            "last_step": attempt.last_step,
            "steps_s": attempt.steps_s,
            "repeated_s": attempt.repeated_s,
            "partition": str(job.find_partition(attempt.label) or ""),
            "outcome": attempt.outcome,
        }
        for attempt in analysis.goodput.attempts
    ]
    return pd.DataFrame(rows)


def _make_accounting(job: Job, analysis: Analysis) -> pd.DataFrame:
    del job
    return analysis.accounting.rows


def _make_steps(job: Job, analysis: Analysis) -> pd.DataFrame:
    times = analysis.times
    if times.empty:
        return pd.DataFrame()
    order = {attempt.label: at for at, attempt in enumerate(job.sources.attempts)}
    table = times.rename(columns={"count": "num_steps"})
    table["begin"] = add_seconds(job.traces.zero_ns, table["begin_s"])
    bubbles = analysis.bubbles.rename(columns={"makespan_s": "pipeline_s"})
    if len(bubbles):
        table = table.merge(bubbles, on=["attempt", "step"], how="left")
    last = table.assign(order=table["attempt"].map(order)).groupby("step")["order"].transform("max")
    table["is_repeated"] = [
        order[attempt] < most for attempt, most in zip(table["attempt"], last, strict=True)
    ]
    place = table["attempt"].map(order)
    return table.assign(place=place).sort_values(["place", "step"], kind="stable")


def _make_rank_steps(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    raw = job.traces.steps
    if raw.empty:
        return raw
    columns: dict[str, Any] = {
        name: raw[name] for name in ("attempt", "rank", "stage", "replica", "step")
    }
    for name in ("begin", "first", "last"):
        columns[name] = add_seconds(job.traces.zero_ns, raw[f"{name}_s"])
    for name in ("took_s", "wait_s", "work_s"):
        columns[name] = raw[name]
    for kind, (name, _) in KIND_COLUMNS.items():
        columns[name] = raw.get(f"{kind}_s", 0.0)
    return pd.DataFrame(columns)


def _make_events(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    count = sum(trace.num_events for trace in job.traces.ranks)
    if not count:
        return _fit_events(job, job.events)
    if count <= MOST_EVENTS:
        frames = list(stream_events(job.traces))
        return _fit_events(job, pd.concat(frames, ignore_index=True))
    wanted = {*job.chosen.values(), *choose_more(job.traces, MOST_EVENTS // 2)}
    return _fit_events(job, read_events(job.traces, wanted))


def _fit_events(job: Job, raw: pd.DataFrame) -> pd.DataFrame:
    if raw.empty:
        return pd.DataFrame()
    has_clock = any(trace.num_events for trace in job.traces.ranks)
    begin = raw["begin_s"] if has_clock else raw["begin_s"] * float("nan")
    columns = {
        name: raw[name]
        for name in ("attempt", "rank", "replica", "stage", "step", "kind", "what", "begin_s")
    }
    columns["microbatch"] = raw["microbatch"].where(raw["microbatch"] >= 0)
    columns["bytes"] = raw["bytes"]
    columns["begin"] = add_seconds(job.traces.zero_ns, begin)
    columns["wait_s"] = (raw["ready_s"] - raw["begin_s"]).round(9)
    columns["work_s"] = (raw["end_s"] - raw["ready_s"]).round(9)
    return pd.DataFrame(columns)


def _make_ranks(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for found in list_ranks(job).to_dict("records"):
        row = rows.setdefault((found["attempt"], int(found["rank"])), {"num_events": 0})
        doubt = found["residual_ns"]
        row |= {
            "node": found["host"],
            "stage": found["stage"],
            "replica": found["replica"],
            "device": found["device"],
            "num_events": row["num_events"] + found["num_events"],
            "clock_doubt_s": None if doubt is None or doubt != doubt else doubt / 1e9,
        }
    for attempt, counts in job.counts.items():
        for rank, one in counts.items():
            row = rows.setdefault((attempt, rank), {})
            row |= {"steps": one.count, "steps_s": one.steps_s, "pauses_s": one.pauses_s}
    for found in job.exits.to_dict("records"):
        if type(found["rank"]) is not int:
            continue
        row = rows.setdefault((found["attempt"], found["rank"]), {})
        row |= {
            "node": found["node"] or row.get("node"),
            "started": found["started"],
            "ended": found["ended"],
            "exit_code": None if found["signal"] else found["code"],
            "signal": found["signal"],
            "was_stopped": found["stopped"],
            "last_error": found["last_error"],
        }
    order = {attempt.label: at for at, attempt in enumerate(job.sources.attempts)}
    keys = sorted(rows, key=lambda key: (order.get(key[0], 0), key[1]))
    return pd.DataFrame([{"attempt": key[0], "rank": key[1], **rows[key]} for key in keys])


def _make_nodes(job: Job, analysis: Analysis) -> pd.DataFrame:
    ranks = _make_ranks(job, analysis)
    rows = []
    for attempt in job.sources.attempts:
        reports = _read_reports(attempt.folder)
        own = ranks[ranks["attempt"] == attempt.label] if len(ranks) else ranks
        logs = (*attempt.logs, *attempt.errors)
        names = [*reports, *(node for node, _ in (*logs, *attempt.gpus))]
        names += [str(node) for node in own["node"].dropna()] if len(own) else []
        for node in dict.fromkeys(names):
            index, group = reports.get(node, (None, None))
            gpus = job.gpus
            if len(gpus):
                gpus = gpus[(gpus["attempt"] == attempt.label) & (gpus["node"] == node)]
                gpus = gpus[gpus["gpu"] != "cpu"]
            sizes = [_measure_size(path) for name, path in logs if name == node]
            rows.append(
                {
                    "attempt": attempt.label,
                    "node": node,
                    "index": index,
                    "group": group,
                    "num_ranks": int((own["node"] == node).sum()) if len(own) else 0,
                    "num_gpus": gpus["gpu"].nunique() if len(gpus) else 0,
                    "gpu_name": ", ".join(sorted(set(gpus["name"]))) if len(gpus) else "",
                    "log_bytes": sum(sizes),
                }
            )
    return pd.DataFrame(rows)


def _read_reports(attempt: Path) -> dict[str, tuple[Any, Any]]:
    """Return the index in the plan and the group of each host."""
    folder = AttemptFolder(attempt, 0).node_report(0).parent
    values = [read_json(path) for path in list_files(folder, "*.json")]
    found = {
        str(value["host"]): (value.get("index"), value.get("group"))
        for value in values
        if isinstance(value, dict) and value.get("host")
    }
    return dict(sorted(found.items(), key=lambda item: str(item[1][0]).zfill(9)))


def _measure_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _make_gpus(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    names = {"temperature": "temperature_c", "utilization": "busy_percent"}
    return job.gpus.rename(columns=names)


def _make_losses(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    raw = job.logs["iterations"]
    if raw.empty:
        return raw
    table = raw.drop_duplicates(["attempt", "step"]).drop(columns="timed", errors="ignore")
    names = {"skipped": "num_skipped", "nan": "num_nan", "written": "time"}
    table = table.drop(columns="time", errors="ignore").rename(columns=names)
    return table.assign(step_s=table.pop("time_ms").astype(float) / 1000)


def _make_memory(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    names = ("allocated", "max_allocated", "reserved", "max_reserved")
    return job.logs["memory"].rename(columns={name: f"{name}_mb" for name in names})


def _make_logs(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    return read_log_lines(job.sources)


def _make_history(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    own = ("time", "kind", "attempt")
    rows = [
        {
            "time": event["time"],
            "kind": event.get("kind"),
            "attempt": event.get("attempt"),
            "facts": json.dumps({name: event[name] for name in event if name not in own}),
        }
        for event in job.history
    ]
    return pd.DataFrame(rows, dtype=object)  # numbers would make 0.0 of attempt 0


def _make_findings(job: Job, analysis: Analysis) -> pd.DataFrame:
    return pd.DataFrame([vars(one) for one in find_all(job, analysis)])


def _make_not_read(job: Job, analysis: Analysis) -> pd.DataFrame:
    del analysis
    return pd.DataFrame(list(job.skipped.items()), columns=["file", "why"])


def _take(name: str) -> Callable[[Job, Analysis], pd.DataFrame]:
    return lambda job, analysis: job.logs[name]


MAKERS: dict[str, Callable[[Job, Analysis], pd.DataFrame]] = {
    "attempts": _make_attempts,
    "accounting": _make_accounting,
    "steps": _make_steps,
    "rank_steps": _make_rank_steps,
    "events": _make_events,
    "ranks": _make_ranks,
    "nodes": _make_nodes,
    "gpus": _make_gpus,
    "losses": _make_losses,
    "memory": _make_memory,
    "logs": _make_logs,
    "history": _make_history,
    "findings": _make_findings,
    "timers": _take("timers_by_rank"),
    "timers_by_step": _take("timers_by_step"),
    "not_read": _make_not_read,
}


# Files.


def write_csv(tables: JobTables, folder: Path) -> list[Path]:
    """Write a file for each table with rows; `events.csv` has all events. Times are ISO 8601."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, frames in _list_frames(tables):
        path = folder / f"{name}.csv"
        for number, frame in enumerate(frames):
            frame.to_csv(path, mode="a" if number else "w", header=not number, index=False)
            written += [] if number else [path]
    return written


def write_parquet(tables: JobTables, folder: Path) -> list[Path]:
    """Write a Parquet file, which keeps types and is small, for each table with rows."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, frames in _list_frames(tables):
        path = folder / f"{name}.parquet"
        writer: parquet.ParquetWriter | None = None
        for frame in frames:
            table = pa.Table.from_pandas(frame, preserve_index=False)
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
                written.append(path)
            writer.write_table(table)
        if writer is not None:
            writer.close()
    return written


def _list_frames(tables: JobTables) -> Iterator[tuple[str, Iterator[pd.DataFrame]]]:
    """Yield each table that has rows, in pieces, since all events may exceed the memory."""
    job = tables.job
    for name in TABLES:
        if name == "events" and any(trace.num_events for trace in job.traces.ranks):
            yield name, (fit_table(name, _fit_events(job, frame)) for frame in _gather(job))
        elif len(tables[name]):
            yield name, iter([tables[name]])


def _gather(job: Job, rows: int = 200_000) -> Iterator[pd.DataFrame]:
    """Yield all events in pieces of about `rows` rows, to avoid many small pieces."""
    held: list[pd.DataFrame] = []
    for frame in stream_events(job.traces):
        held.append(frame)
        if sum(map(len, held)) >= rows:
            yield pd.concat(held, ignore_index=True)
            held = []
    if held:
        yield pd.concat(held, ignore_index=True)

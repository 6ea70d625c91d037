"""The tables as files, CSV or Parquet, for whoever wants to look further."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from vjob.reports.analysis.measures import Analysis, list_ranks
from vjob.reports.load.tables import Job
from vjob.reports.load.trace_reader import stream_events

_EVENTS = pa.schema(
    [
        ("attempt", pa.string()),
        ("rank", pa.int64()),
        ("replica", pa.int64()),
        ("kind", pa.string()),
        ("step", pa.int64()),
        ("stage", pa.int64()),
        ("microbatch", pa.int64()),
        ("begin_s", pa.float64()),
        ("ready_s", pa.float64()),
        ("end_s", pa.float64()),
        ("bytes", pa.int64()),
        ("what", pa.string()),
    ]
)


def build_tables(job: Job, analysis: Analysis) -> dict[str, pd.DataFrame]:
    """All tables but the events, which are many."""
    tables = {
        "ranks": list_ranks(job),
        "steps": job.traces.steps,
        "bubbles": analysis.bubbles,
        "gpus": job.gpus,
        "exits": job.exits,
        "history": pd.DataFrame(job.history),
        "skipped": pd.DataFrame(list(job.skipped.items()), columns=["file", "why"]),
        **job.logs,
    }
    return {name: table for name, table in tables.items() if len(table)}


def write_csv(job: Job, analysis: Analysis, folder: Path) -> list[Path]:
    """A file a table; `events.csv` is every event of the traces."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in build_tables(job, analysis).items():
        written.append(folder / f"{name}.csv")
        table.to_csv(written[-1], index=False)
    path = folder / "events.csv"
    for number, frame in enumerate(_gather(job)):
        frame.to_csv(path, index=False, header=number == 0, mode="w" if number == 0 else "a")
        if number == 0:
            written.append(path)
    return written


def write_parquet(job: Job, analysis: Analysis, folder: Path) -> list[Path]:
    """The same as Parquet, which keeps types and is far smaller."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in build_tables(job, analysis).items():
        written.append(folder / f"{name}.parquet")
        mixed = {column: "string" for column in table.columns if table[column].dtype == object}
        table.astype(mixed).to_parquet(written[-1], index=False)
    path = folder / "events.parquet"
    writer: parquet.ParquetWriter | None = None
    try:
        for frame in _gather(job):
            if writer is None:
                writer = parquet.ParquetWriter(path, _EVENTS)
                written.append(path)
            writer.write_table(pa.Table.from_pandas(frame, _EVENTS, preserve_index=False))
    finally:
        if writer is not None:
            writer.close()
    return written


def _gather(job: Job, rows: int = 200_000) -> Iterator[pd.DataFrame]:
    """All events in pieces of about so many rows: a piece a rank would be a thousand small ones."""
    held: list[pd.DataFrame] = []
    for frame in stream_events(job.traces):
        held.append(frame)
        if sum(map(len, held)) >= rows:
            yield pd.concat(held, ignore_index=True)
            held = []
    if held:
        yield pd.concat(held, ignore_index=True)

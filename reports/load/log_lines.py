"""Read the lines of all logs with their times of writing; of large logs only the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from varuna_core.records.files import as_whole, open_file
from varuna_core.records.logs.progress import parse_time, split_tag
from varuna_core.records.logs.times import MarkReader
from vjob.reports.load.sources import AttemptSources, Sources

MOST_BYTES = 1 << 26
"""Bytes read from all logs together, divided equally among the logs."""
LEAST_BYTES = 1 << 12
MOST_LINES = 1_000_000
"""Maximum number of lines kept of a log, since many of them may be short."""
LONGEST_LINE = 1 << 16
"""Maximum number of characters of a line; longer lines are truncated."""


def read_log_lines(sources: Sources, most_bytes: int = MOST_BYTES) -> pd.DataFrame:
    """Return attempt, node, stream, offset, time (since 1970, or None), rank and text of lines."""
    logs = [
        (attempt, node, stream, path)
        for attempt in sources.attempts
        for stream, found in (("out", attempt.logs), ("err", attempt.errors))
        for node, path in found
    ]
    most = max(LEAST_BYTES, most_bytes // max(1, len(logs)))
    rows = [row for log in logs for row in _read_log(*log, most)]
    names = ["attempt", "node", "stream", "offset", "time", "rank", "text"]
    return pd.DataFrame(rows, columns=names)


def _read_log(
    attempt: AttemptSources, node: str, stream: str, path: Path, most: int
) -> Iterator[dict[str, Any]]:
    marks = MarkReader(path.with_suffix(".times"), is_err=stream == "err")
    own_rank = as_whole(path.stem) if path.parent.name == "ranks" else None
    try:
        with open_file(path) as handle:
            size = handle.seek(0, 2)
            place = max(0, size - most)
            handle.seek(place)
            data = handle.read(size - place)
        year = time.gmtime(path.stat().st_mtime).tm_year
    except OSError:  # vanished, or its server did
        return
    if place:  # in the middle of a line
        _, _, rest = data.partition(b"\n")
        place, data = place + len(data) - len(rest), rest
    lines = data.rsplit(b"\n", MOST_LINES)
    if len(lines) > MOST_LINES:
        place += len(lines.pop(0)) + 1
    for line in lines:
        at, place = place, place + len(line) + 1
        if not line:
            continue
        text = line[:LONGEST_LINE].decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        rank, words = split_tag(text)
        written, _ = marks.find_exact(at)
        yield {
            "attempt": attempt.label,
            "node": node,
            "stream": stream,
            "offset": at,
            "time": parse_time(words, year) if written is None else written,
            "rank": own_rank if rank is None else rank,
            "text": text if rank is None else words,
        }

"""events*.jsonl: what happened to a run, in order. One writer a file, one line an event.

Kinds: intent, submitted, refused, adopted, started, preflight, stopping, ended, cancel-asked,
requeued, morph, left-out, grow-asked, shrink-asked, slow-asked, withdrawn,
from-memory; of `vjob watch` verdict, notice, action; a later one (checkpoint) joins the list.
`time` is seconds since the epoch, UTC.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from varuna_core.records.files import append_line, read_lines
from varuna_core.records.runfolder import RunFolder


def append_event(path: Path, kind: str, **facts: Any) -> None:
    append_line(path, {"time": round(time.time(), 3), "kind": kind, **facts})


def read_events(run: RunFolder) -> list[dict[str, Any]]:
    """All events of the run in time order, whichever job wrote them."""
    events = [
        event
        for path in run.all_events()
        for event in read_lines(path)
        if isinstance(event, dict) and isinstance(event.get("time"), (int, float))
    ]
    return sorted(events, key=lambda event: float(event["time"]))

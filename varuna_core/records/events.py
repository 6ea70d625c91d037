"""events*.jsonl: what happened to a run, in order. One writer a file, one line an event.

Kinds: intent, submitted, refused, adopted, started, preflight, stopping, ended, cancel-asked,
requeued, morph, left-out, grow-asked, shrink-asked, slow-asked, withdrawn,
from-memory; of `vjob watch` verdict, notice, action; a later one (checkpoint) joins the list.
`time` is seconds since the epoch, UTC.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

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


MORPH_PARTS = ("notice_s", "stop_s", "plan_s", "start_s", "load_s", "first_step_s")
"""Parts of a morph's pause, in order: from the last sign that all was well to the first step in the
new layout. `varuna_core/morph/cost.py` writes them."""


def read_morph_parts(event: Mapping[str, Any]) -> Dict[str, float]:
    """Seconds by part, as far as the event has them: one that ended before its first step lacks
    some."""
    return {name: float(event[name]) for name in MORPH_PARTS if _is_number(event.get(name))}


def read_pause_s(event: Mapping[str, Any]) -> Optional[float]:
    """None where no step came of it."""
    return float(event["pause_s"]) if _is_number(event.get("pause_s")) else None


def format_morph(event: Mapping[str, Any]) -> str:
    """`from 8 x 4 to 6 x 4, 12 s`."""
    pause_s = read_pause_s(event)
    took = "no step came of it" if pause_s is None else f"{pause_s:.0f} s"
    return f"from {event.get('from', '?')} to {event.get('to', '?')}, {took}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

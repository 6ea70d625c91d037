"""GPU samples: our JSON lines, or the text of gpustat, which tells no time but in its headings."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from vjob.reports.load.blocks import BlockReader, Thinned

MOST_SAMPLES = 20_000
"""Rows kept of a node, evenly spread."""
_LINE = re.compile(
    r"\[(\d{1,4}|cpu)\] (.{1,80}?) *\| *(\d{1,9}|\?\?)'C, *(\d{1,9}|\?\?) ?% *"
    r"\| *(\d{1,9}|\?\?) */ *(\d{1,9}|\?\?) MB"
)
_HEADING = re.compile(r"\S+ +(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})\b")


def read_gpus(attempt: str, node: str, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows (attempt, node, time, gpu, name, temperature, utilization, memory_used_mb,
    memory_total_mb, power_w; None is not known), and how many lines made no sense."""
    rows, skipped, time = Thinned(MOST_SAMPLES), 0, None
    blocks = BlockReader(path)
    for _, block in blocks:
        for line in block.split(b"\n"):
            text = line.decode("utf-8", "replace").strip()
            if not text or text.startswith("#"):
                continue
            if path.name.endswith(".jsonl"):
                found = _parse_sample(text)
            else:
                heading = _HEADING.match(text)
                time = _read_time(heading.group(1)) if heading else time
                found = [] if heading else _parse_text(text, time)
            if found is None:
                skipped += 1
                continue
            for row in found:
                rows.append({"attempt": attempt, "node": node, **row})
    return rows.rows, skipped + blocks.skipped


def _parse_sample(text: str) -> list[dict[str, Any]] | None:
    try:
        value = json.loads(text)
        time, gpus = float(value["time"]), value["gpus"]
        rows = [{"time": time, "gpu": str(gpu["index"]), **_pick(gpu)} for gpu in gpus]
        if not rows:
            cpu = {"name": "processors", "utilization": value.get("cpu_percent")}
            rows.append({"time": time, "gpu": "cpu", **_pick({**value, **cpu})})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return rows


def _pick(value: dict[str, Any]) -> dict[str, Any]:
    names = ("temperature", "utilization", "memory_used_mb", "memory_total_mb", "power_w")
    row: dict[str, Any] = {"name": str(value.get("name", ""))[:80]}
    for name in names:
        number = value.get(name)
        row[name] = float(number) if isinstance(number, (int, float)) else None
    return row


def _parse_text(text: str, time: float | None) -> list[dict[str, Any]] | None:
    match = _LINE.search(text)
    if match is None:
        return None
    index, name, *numbers = match.groups()
    heat, busy, used, total = (None if word == "??" else float(word) for word in numbers)
    return [
        {
            "time": time,
            "gpu": index,
            "name": name,
            "temperature": heat,
            "utilization": busy,
            "memory_used_mb": used,
            "memory_total_mb": total,
            "power_w": None,
        }
    ]


def _read_time(text: str) -> float | None:
    try:
        return datetime.strptime(" ".join(text.split()), "%a %b %d %H:%M:%S %Y").timestamp()
    except (ValueError, OverflowError, OSError):
        return None

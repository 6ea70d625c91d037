"""Read GPU samples: our JSON lines, or gpustat's text, in which only headings have times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import parse_fault
from varuna_core.records.files import parse_json
from varuna_core.records.logs.gpu_text import is_heading, parse_heading, parse_line
from vjob.reports.load.blocks import BlockReader, Thinned

MOST_SAMPLES = 20_000
"""Samples kept for a node, evenly spread."""
NUMBERS = ("temperature", "utilization", "memory_used_mb", "memory_total_mb", "power_w")
"""Columns of a GPU; gpustat's text has no power."""
HOST = {"cpu_percent": "cpu_percent", "swap_mb": "swap_used_mb", "num_cpus": "num_cpus"}
"""Columns of the node, with the same value for all its GPUs, and their names in our JSON lines."""


@dataclass(frozen=True)
class NodeFaults:
    """Facts about a node in its samples: hardware faults, and samples in which no GPU was read."""

    attempt: str
    node: str
    faults: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    """The last state of each fault, by kind, part and number or detail."""
    unread: dict[str, int] = field(default_factory=dict)
    """Number of samples in which no GPU could be read, by the reason."""

    def add(self, text: str) -> None:
        """Add the faults in a line of samples, and the reason if no GPU could be read."""
        if '"faults"' not in text and '"gpus_not_known"' not in text:
            return
        value = parse_json(text)
        if not isinstance(value, dict):
            return
        if reason := str(value.get("gpus_not_known") or "")[:200]:
            self.unread[reason] = self.unread.get(reason, 0) + 1
        rows = value.get("faults")
        for row in rows if isinstance(rows, list) else ():
            one = parse_fault(row) if isinstance(row, dict) else None
            if one is not None:
                more = one.values.get("code") or one.values.get("detail")
                self.faults[one.rule, one.values["part"], str(more)] = one


def read_gpus(path: Path, beside: NodeFaults) -> tuple[list[dict[str, Any]], int]:
    """Return rows (attempt, node, time, gpu, name, temperature, utilization, memory_used_mb,
    memory_total_mb, power_w, throttle, and the columns HOST; None if not known), and the number of
    lines that could not be parsed."""
    rows, skipped, time = Thinned(MOST_SAMPLES), 0, None
    blocks = BlockReader(path)
    is_json = path.name.endswith(".jsonl")
    for _, block in blocks:
        for line in block.split(b"\n"):
            if is_json and b'"gpus"' not in line and b'"note"' not in line:  # not worth parsing
                skipped += bool(line) and line[:1] != b"#" and not line.isspace()
                continue
            text = line.decode("utf-8", "replace").strip()
            if not text or text.startswith("#"):
                continue
            if is_json:
                found = _parse_sample(text)
                if found is not None:
                    beside.add(text)
            else:
                has_heading = is_heading(text)
                time = parse_heading(text) if has_heading else time
                found = [] if has_heading else _parse_text(text, time)
            if found is None:
                skipped += 1
                continue
            for row in found:
                rows.append({"attempt": beside.attempt, "node": beside.node, **row})
    return rows.rows, skipped + blocks.skipped


def _parse_sample(text: str) -> list[dict[str, Any]] | None:
    try:
        value = parse_json(text)
        if "note" in value and "gpus" not in value:  # the agent's words about its readings
            return []
        time, gpus = float(value["time"]), value["gpus"]
        host = {name: _read_number(value.get(key)) for name, key in HOST.items()}
        rows = [{"time": time, "gpu": str(gpu["index"]), **_pick(gpu), **host} for gpu in gpus]
        if not rows:
            cpu = {"name": "processors", "utilization": value.get("cpu_percent")}
            rows.append({"time": time, "gpu": "cpu", **_pick({**value, **cpu}), **host})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return rows


def _pick(value: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": str(value.get("name", ""))[:80]}
    for name in NUMBERS:
        row[name] = _read_number(value.get(name))
    row["throttle"] = str(value.get("throttle") or "")[:80]
    return row


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _parse_text(text: str, time: float | None) -> list[dict[str, Any]] | None:
    line = parse_line(text)
    if line is None:
        return None
    row = {"time": time, "gpu": line.index, "name": line.name}
    unknown = {"throttle": "", **dict.fromkeys(HOST)}
    return [{**row, **{name: getattr(line, name, None) for name in NUMBERS}, **unknown}]

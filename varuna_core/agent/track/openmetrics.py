"""Render numbers in Prometheus' text format, in which each line is a gauge.

    # HELP vjob_loss Loss of the last step that was printed.
    # TYPE vjob_loss gauge
    vjob_loss{run="gpt-1123-1400"} 2.31

Only gauges and an end mark, so that the same text is right as Prometheus' own format, which node
exporter reads, and as OpenMetrics.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Tuple

from varuna_core.records.files import write_atomic

READABLE = 0o644
"""File mode; node exporter, which reads the file, runs as another user."""
HELP = {
    "vjob_run_info": "Information about a run of vjob; the value is always 1.",
    "vjob_run_up": "1 while the run runs, 0 before and after.",
    "vjob_attempt": "Number of the attempt, from 0.",
    "vjob_updated_timestamp_seconds": "Time at which these numbers were written.",
    "vjob_step": "The last step that was completed.",
    "vjob_steps": "Steps in all.",
    "vjob_loss": "Loss of the last printed step.",
    "vjob_step_seconds": "Seconds that a step takes.",
    "vjob_samples_per_second": "Samples a second.",
    "vjob_tokens_per_second": "Tokens a second.",
    "vjob_events": "Events of the run so far, by kind.",
    "vjob_gpu_utilization_ratio": "Share of time in which the GPU was busy, 0 to 1.",
    "vjob_gpu_memory_used_bytes": "Memory of the GPU in use.",
    "vjob_gpu_power_watts": "Power that the GPU draws.",
    "vjob_gpu_temperature_celsius": "Temperature of the GPU.",
    "vjob_node_cpu_ratio": "Share of time in which the node's processors were busy, 0 to 1.",
    "vjob_node_memory_used_bytes": "Memory of the node in use.",
}
_MB = float(1 << 20)
_GPU = {
    "utilization_percent": ("vjob_gpu_utilization_ratio", 0.01),
    "memory_used_mb": ("vjob_gpu_memory_used_bytes", _MB),
    "power_w": ("vjob_gpu_power_watts", 1.0),
    "temperature_c": ("vjob_gpu_temperature_celsius", 1.0),
}
_NODE = {
    "cpu_percent": ("vjob_node_cpu_ratio", 0.01),
    "memory_used_mb": ("vjob_node_memory_used_bytes", _MB),
}
_PLAIN = {
    "step_time_s": "vjob_step_seconds",
    "samples_per_s": "vjob_samples_per_second",
    "tokens_per_s": "vjob_tokens_per_second",
    "steps": "vjob_steps",
    "loss": "vjob_loss",
}


@dataclass(frozen=True)
class Gauge:
    """One line of a metrics file: a name with labels, and a value."""

    name: str
    value: float
    labels: Tuple[Tuple[str, str], ...] = ()


def build_gauge(name: str, value: float, labels: Mapping[str, str]) -> Gauge:
    """Build the gauge of a point's value, such as `gpu/node7/0/power_w`."""
    factor, more = 1.0, {}
    parts = name.split("/")
    if parts[0] == "gpu" and len(parts) == 4 and parts[3] in _GPU:
        metric, factor = _GPU[parts[3]]
        more = {"node": parts[1], "gpu": parts[2]}
    elif parts[0] == "node" and len(parts) == 3 and parts[2] in _NODE:
        metric, factor = _NODE[parts[2]]
        more = {"node": parts[1]}
    elif parts[0] == "events" and len(parts) == 2:
        metric, more = "vjob_events", {"kind": parts[1]}
    else:
        metric = _PLAIN.get(name) or "vjob_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name)
    return Gauge(metric, value * factor, tuple({**labels, **more}.items()))


def render_gauges(gauges: Iterable[Gauge]) -> str:
    """Render the text: one block for each name, in the order of first occurrence."""
    blocks: Dict[str, List[str]] = {}
    for gauge in gauges:
        help_text = HELP.get(gauge.name, "A number that the run printed.")
        block = blocks.setdefault(
            gauge.name, [f"# HELP {gauge.name} {help_text}", f"# TYPE {gauge.name} gauge"]
        )
        labels = ",".join(f'{name}="{_escape(value)}"' for name, value in gauge.labels)
        block.append(f"{gauge.name}{{{labels}}} {_format(gauge.value)}")
    return "".join(f"{line}\n" for block in blocks.values() for line in block) + "# EOF\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def write_gauges(path: Path, gauges: Iterable[Gauge]) -> None:
    """Write the file atomically, so that no exporter reads half of it."""
    write_atomic(path, render_gauges(gauges), READABLE, lasts=False)

"""Write a profile's file: the planner's format, with details that planning does not need.

"details" lists for each kind of GPU and tensor degree which segments are equal, which were measured
at each size, and where memory ran out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.planner.profile.profile import FIGURES, HOST_TIMES, TIMES, Cell, Profile, Spread
from varuna_core.planner.profile.profile_file import read_profile, write_profile
from varuna_core.profiling.bench import Figures
from varuna_core.records.files import write_atomic


@dataclass(frozen=True, kw_only=True)
class Detail:
    """How one kind of GPU was measured at one tensor degree."""

    gpu: str
    tensor: int
    equals: list[list[int]]
    """Classes of equal segments: the measured ones have their own figures, the others the median of
    the class."""
    measured: dict[str, list[int]]
    """Measured segments by micro-batch size."""
    largest_micro_batch: int
    """The largest size that was measured."""
    stopped: str = ""
    """Why no larger size was measured: where memory ran out; empty if all sizes were done."""


def build_cell(
    figures: Sequence[Figures], empty: Figures | None, spread: Spread | None = None
) -> Cell:
    """Build a profile's cell: the segments' figures minus those of an empty stage, if it is known.

    A first segment that does almost nothing and takes no message may be quicker than an empty
    stage; it then counts as 0.
    """
    actions = {
        name: 0.0 if empty is None else float(getattr(empty, name)) for name in TIMES + HOST_TIMES
    }
    # A recompute between products costs by itself what any does.
    own = {"selective_s": actions["recompute_s"], "selective_host_s": actions["recompute_host_s"]}
    own |= actions
    columns: dict[str, Any] = {
        name: tuple(max(0.0, getattr(one, name) - own.get(name, 0.0)) for one in figures)
        for name in FIGURES
        if all(getattr(one, name) is not None for one in figures)
    }
    device, host = (tuple(actions[name] for name in names) for names in (TIMES, HOST_TIMES))
    return Cell(**columns, action_s=device, action_host_s=host, spread=spread)


def read_kept(path: Path) -> Profile | None:
    """Return the existing profile; None if there is none."""
    return read_profile(path) if path.exists() else None


def extend_file(
    path: Path, kept: Profile | None, new: Profile, details: Sequence[Detail]
) -> Profile:
    """Write the existing profile extended by the new one, whose figures take precedence."""
    told = tuple(json.loads(json.dumps(asdict(detail))) for detail in details)
    profile = replace(new, details=told)
    if kept is not None:
        profile = kept.extend(profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(path, profile)
    return profile


def copy_file(path: Path, target: Path) -> None:
    write_atomic(target, path.read_text(encoding="utf-8"))


def describe_profile(profile: Profile, details: Sequence[Detail]) -> str:
    """Return a table of a profile: times and memory by GPU, degree and size, and the links."""
    rows = [["GPU", "tensor", "micro-batch", "forward", "backward", "largest segment", "optimizer"]]
    for kind, gpu in sorted(profile.gpus.items()):
        for (size, tensor), cell in sorted(gpu.cells.items(), key=lambda item: item[0][::-1]):
            backward = sum(cell.backward_s)
            largest = max(g + w for g, w in zip(cell.graph_bytes, cell.work_bytes, strict=True))
            rows.append(
                [
                    kind,
                    str(tensor),
                    str(size),
                    _show_s(sum(cell.forward_s)),
                    _show_s(backward),
                    f"{largest / 2**20:.1f} MiB",
                    _show_s(sum(gpu.optimizer_s.get(tensor, ()))),
                ]
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(w.ljust(n) for w, n in zip(r, widths, strict=True)).rstrip() for r in rows]
    for detail in details:
        chosen = sorted({segment for held in detail.measured.values() for segment in held})
        num_segments = sum(map(len, detail.equals))
        lines.append(
            f"{detail.gpu}, tensor {detail.tensor}: segments {', '.join(map(str, chosen))} measured"
            + (", the others copied from equal segments" if len(chosen) < num_segments else "")
            + (f"; {detail.stopped}" if detail.stopped else "")
        )  # fmt: skip
    for (a, b, where), link in sorted(profile.network.links.items()):
        lines.append(f"{a} to {b}, {where}-node: {_show_link(link.points)}")
    for (kind, ranks, on_a_node), link in sorted(profile.network.all_reduces.items()):
        lines.append(f"all-reduce, {ranks} {kind}, {on_a_node} per node: {_show_link(link.points)}")
    return "\n".join(lines)


def _show_link(points: Sequence[tuple[float, float]]) -> str:
    (_, latency), (size, took) = points[0], points[-1]
    return f"{latency * 1e6:.0f} us, {size / took / 1e9:.2f} GB/s at {size / 2**20:.2g} MiB"


def _show_s(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"

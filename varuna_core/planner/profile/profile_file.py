"""A profile as JSON, version 2: what `vjob profile` writes and `vjob plan` reads.

{"vjob_profile": 2,
 "model": {"name": ..., "digest": ..., "num_segments": 50, "parameters": {"1": [...]},
           "ties": [{"segments": [0, 49], "parameters": 80411200}]},
 "software": {"torch": "2.13.0", "cuda": "13.0"},
 "gpus": {"A100": {"memory_bytes": ..., "optimizer_s": {"1": [...]}, "cells":
           [{"micro_batch": 1, "tensor": 1, "source": "measured", "forward_s": [...], ...,
             "action_s": {"forward_s": 0.0001, ...},
             "spread": {"rounds": [0.98, 0.99, 1.0, 1.01, 1.03], "forward_s": [...], ...}}]}},
 "links": [{"from": "A100", "to": "A10", "where": "inter", "source": "measured",
            "points": [[1024, 2e-05], ...]}],
 "all_reduces": [{"gpu": "A10", "ranks": 8, "on_a_node": 4, "points": [...]}],
 "halves": [{"half": "reduce", "gpu": "A10", "ranks": 8, "on_a_node": 4, "points": [...]}],
 "details": [{"gpu": "A10", "tensor": 1, ...}]}

Version 1 had neither `backward_s`, which is then the sum of both gradients, nor `action_s`: what an
action costs by itself was in every segment's figures. `spread` exists only if it was measured;
`forward_host_s` and similar figures, in cells and in `action_s`, exist only if the host's time
differs from the device's. Older files of version 2 have no figures of `recompute` selective and
offload, nor `copies_beside`, nor `halves`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import (
    FIGURES,
    HALVES,
    HOST_TIMES,
    OPTIONAL,
    TIMES,
    Cell,
    GpuProfile,
    Half,
    LinkKey,
    LinkTime,
    Model,
    Network,
    Profile,
    Source,
    Spread,
    Tie,
)
from varuna_core.records.files import write_atomic

FORMAT = 2
_SOURCES = ("measured", "interpolated", "estimate")


def render_profile(profile: Profile) -> str:
    """Render a profile with sorted keys and one cell a line, so two can be compared as text."""
    model, network = profile.model, profile.network
    fields = {
        "vjob_profile": FORMAT,
        "model": {
            "name": model.name,
            "digest": model.digest,
            "num_segments": model.num_segments,
            "parameters": {str(k): list(v) for k, v in sorted(model.parameters.items())},
            "ties": [
                {"segments": list(tie.segments), "parameters": tie.parameters} for tie in model.ties
            ],
        },
        "software": dict(sorted(profile.software.items())),
        "gpus": {kind: _render_gpu(gpu) for kind, gpu in sorted(profile.gpus.items())},
        "links": [
            {"from": a, "to": b, "where": where, "source": link.source, "points": link.points}
            for (a, b, where), link in sorted(network.links.items())
        ],
        "all_reduces": [
            {
                "gpu": kind,
                "ranks": ranks,
                "on_a_node": on_a_node,
                "source": link.source,
                "points": link.points,
            }
            for (kind, ranks, on_a_node), link in sorted(network.all_reduces.items())
        ],
        "halves": [
            {
                "half": half,
                "gpu": kind,
                "ranks": ranks,
                "on_a_node": on_a_node,
                "source": link.source,
                "points": link.points,
            }
            for (half, kind, ranks, on_a_node), link in sorted(network.halves.items())
        ],
        "details": list(profile.details),
    }
    return json.dumps(fields, indent=1) + "\n"


def _render_gpu(gpu: GpuProfile) -> dict[str, Any]:
    return {
        "memory_bytes": gpu.memory_bytes,
        "optimizer_s": {str(k): list(v) for k, v in sorted(gpu.optimizer_s.items())},
        "optimizer_source": gpu.optimizer_source,
        "copies_beside": gpu.copies_beside,
        "cells": [
            {
                "micro_batch": size,
                "tensor": tensor,
                "source": cell.source,
                **{name: list(getattr(cell, name)) for name in _list_names(cell)},
                "action_s": _render_actions(cell),
                **_render_spread(cell.spread),
            }
            for (size, tensor), cell in sorted(gpu.cells.items())
        ],
    }


def _list_names(cell: Cell) -> list[str]:
    """Return the names of a cell's figures, without those that are not known."""
    hosts = (*HOST_TIMES, "selective_host_s")
    is_known = any(any(getattr(cell, name)) for name in hosts)
    named = [name for name in FIGURES if is_known or name not in hosts]
    return [name for name in named if name not in OPTIONAL or getattr(cell, name)]


def _render_actions(cell: Cell) -> dict[str, float]:
    actions = dict(zip(TIMES, cell.action_s, strict=True))
    if any(cell.action_host_s):
        actions |= zip(HOST_TIMES, cell.action_host_s, strict=True)
    return actions


def _render_spread(spread: Spread | None) -> dict[str, Any]:
    if spread is None:
        return {}
    rows = {"rounds": spread.rounds, **dict(zip(TIMES, spread.actions, strict=True))}
    return {"spread": {name: list(row) for name, row in rows.items()}}


def write_profile(path: Path, profile: Profile) -> None:
    write_atomic(path, render_profile(profile))


def read_profile(path: Path) -> Profile:
    """Read a profile; raise PlanningError with the file's name and what is wrong in it."""
    try:
        return parse_profile(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanningError(f"profile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanningError(f"profile {path}: not a text file") from error
    except PlanningError as error:
        raise PlanningError(f"profile {path}: {error}") from error


def parse_profile(text: str) -> Profile:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanningError(f"not JSON: {error}") from error
    if not isinstance(fields, dict) or "vjob_profile" not in fields:
        raise PlanningError("this is not a profile: it has no key vjob_profile")
    if fields["vjob_profile"] != FORMAT:
        raise PlanningError(
            f"the profile has version {fields['vjob_profile']!r}, but this vjob reads {FORMAT}: "
            "profile again"
        )
    try:
        return _parse(fields)
    except KeyError as error:
        raise PlanningError(f"the key {error.args[0]!r} is missing") from error
    except (TypeError, AttributeError, OverflowError) as error:
        raise PlanningError(f"a value has the wrong type: {error}") from error
    except ValueError as error:  # ours among them
        raise PlanningError(str(error)) from error


def _parse(fields: Mapping[str, Any]) -> Profile:
    given = fields["model"]
    model = Model(
        name=str(given["name"]),
        digest=str(given["digest"]),
        num_segments=int(given["num_segments"]),
        parameters={int(k): tuple(map(int, v)) for k, v in given["parameters"].items()},
        ties=tuple(
            Tie(segments=tuple(map(int, t["segments"])), parameters=int(t["parameters"]))
            for t in given.get("ties", [])
        ),
    )
    if model.num_segments < 1:
        raise PlanningError(f"num_segments is {model.num_segments}")
    for tie in model.ties:
        if len(tie.segments) < 2 or not all(0 <= s < model.num_segments for s in tie.segments):
            raise PlanningError(f"a tie of segments {tie.segments}")
    for counts in model.parameters.values():
        _check_size("parameters", counts, model)
    gpus = {str(kind): _parse_gpu(gpu, model) for kind, gpu in fields["gpus"].items()}
    links: dict[LinkKey, LinkTime] = {}
    for link in fields.get("links", []):
        where = link["where"]
        if where not in ("intra", "inter"):
            raise PlanningError(f"a link where {where!r}: expected intra or inter")
        links[str(link["from"]), str(link["to"]), where] = _parse_link(link)
    all_reduces = {
        (str(one["gpu"]), int(one["ranks"]), int(one["on_a_node"])): _parse_link(one)
        for one in fields.get("all_reduces", [])
    }
    halves: dict[tuple[Half, str, int, int], LinkTime] = {}
    for one in fields.get("halves", []):
        half = one["half"]
        if half not in HALVES:
            known = ", ".join(HALVES)
            raise PlanningError(f"{half!r} is not a half of an all-reduce: use one of {known}")
        key = half, str(one["gpu"]), int(one["ranks"]), int(one["on_a_node"])
        halves[key] = _parse_link(one)
    return Profile(
        model=model,
        software={str(k): str(v) for k, v in fields["software"].items()},
        gpus=gpus,
        network=Network(links=links, all_reduces=all_reduces, halves=halves),
        details=tuple(map(_parse_detail, fields.get("details", []))),
    )


def _parse_detail(fields: Any) -> Mapping[str, Any]:
    """Return a detail unchanged; only its kind of GPU and degree are checked."""
    return {**fields, "gpu": str(fields["gpu"]), "tensor": int(fields["tensor"])}


def _parse_gpu(fields: Mapping[str, Any], model: Model) -> GpuProfile:
    cells = {}
    for given in fields["cells"]:
        names = [name for name in FIGURES if name in given or name not in (*HOST_TIMES, *OPTIONAL)]
        figures = {name: tuple(map(float, given[name])) for name in names}
        _check_size("cells", figures["forward_s"], model)
        actions = given["action_s"]
        figures["action_s"] = tuple(float(actions[name]) for name in TIMES)
        figures["action_host_s"] = tuple(float(actions.get(name, 0)) for name in HOST_TIMES)
        key = int(given["micro_batch"]), int(given["tensor"])
        if min(key) < 1:
            raise PlanningError(f"micro-batch and tensor degree {key}: expected 1 or more")
        spread = _parse_spread(given.get("spread"))
        cells[key] = Cell(**figures, spread=spread, source=_parse_source(given))
    optimizer = {int(k): tuple(map(float, v)) for k, v in fields["optimizer_s"].items()}
    for times in optimizer.values():
        _check_size("optimizer_s", times, model)
        if not all(0 <= time < float("inf") for time in times):
            raise PlanningError(f"optimizer_s: {times}")
    memory = float(fields["memory_bytes"])
    if not 0 < memory < float("inf"):
        raise PlanningError(f"memory_bytes is {memory}")
    return GpuProfile(
        memory_bytes=memory,
        cells=cells,
        optimizer_s=optimizer,
        optimizer_source=_parse_source({"source": fields.get("optimizer_source", "measured")}),
        copies_beside=bool(fields.get("copies_beside", False)),
    )


def _parse_spread(fields: Mapping[str, Any] | None) -> Spread | None:
    if fields is None:
        return None
    rounds, *actions = (tuple(map(float, fields[name])) for name in ("rounds", *TIMES))
    return Spread(rounds=rounds, actions=tuple(actions))


def _parse_link(fields: Mapping[str, Any]) -> LinkTime:
    points = tuple((float(size), float(took)) for size, took in fields["points"])
    return LinkTime(points=points, source=_parse_source(fields))


def _parse_source(fields: Mapping[str, Any]) -> Source:
    source: Source = fields.get("source", "measured")
    if source not in _SOURCES:
        raise PlanningError(f"source {source!r}: expected one of {', '.join(_SOURCES)}")
    return source


def _check_size(name: str, values: tuple[float, ...], model: Model) -> None:
    if len(values) != model.num_segments:
        raise PlanningError(f"{name}: {len(values)} figures for {model.num_segments} segments")

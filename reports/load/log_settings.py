"""Interpret the settings that nodes print into their logs, and find nodes without a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from varuna_core.records.files import open_file
from varuna_core.records.logs.training_log import (
    LogOwner,
    find_other_jobs,
    list_missing_nodes,
    parse_job_info,
)
from vjob.reports.load.logged_calls import read_size
from vjob.reports.load.sources import AttemptSources

HEAD_BYTES = 16 * 1024
"""The settings are looked for in this many bytes at the beginning of a log."""


@dataclass(frozen=True, kw_only=True)
class MissingNodes:
    """Nodes of a job that have no log in the folder."""

    num_nodes: int
    """The number of nodes of the job, by its own settings."""
    indices: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    """Names of nodes that left other files but no log."""


@dataclass(frozen=True, kw_only=True)
class OtherJob:
    """Another job whose logs are in the same folder, and which is not reported on."""

    master: str
    nodes: tuple[str, ...]


def place_nodes(settings: Mapping[str, Sequence[Mapping[str, str]]]) -> dict[int, str]:
    """Return the node of each NODE_RANK; a file with the output of several nodes is ignored."""
    found: dict[int, set[str]] = {}
    for node, blocks in settings.items():
        own = {block.get("NODE_RANK", "") for block in blocks}
        index = next(iter(own)) if len(own) == 1 else ""
        if index.isascii() and index.isdecimal():
            found.setdefault(int(index), set()).add(node)
    return {index: next(iter(nodes)) for index, nodes in found.items() if len(nodes) == 1}


def place_ranks(nodes: Mapping[int, str], info: Mapping[str, str]) -> dict[int, str]:
    """Return the node of each rank from the node of each NODE_RANK; nodes have equal sizes."""
    per = _count_ranks(info)
    return {
        rank: name
        for index, name in nodes.items()
        for rank in range(index * per, index * per + per)
    }


def _count_ranks(info: Mapping[str, str]) -> int:
    """Return the number of ranks on each node; 0 means not known."""
    world, count = read_size(info, "WORLD_SIZE"), read_size(info, "NNODES")
    return world // count if world and count and world % count == 0 else 0


def place_devices(hosts: Mapping[int, str], gpus: pd.DataFrame) -> dict[int, str]:
    """Return the kind of GPU of each rank, by its node's samples; ranks use GPUs in order."""
    if gpus.empty:
        return {}
    own = gpus[gpus["gpu"] != "cpu"].drop_duplicates(["node", "gpu"])
    kinds: dict[str, list[str]] = {}
    for node, kind in own.sort_values(["node", "gpu"])[["node", "name"]].itertuples(index=False):
        kinds.setdefault(str(node), []).append(str(kind))
    found: dict[int, str] = {}
    seen: dict[str, int] = {}
    for rank, host in sorted(hosts.items()):
        at = seen[host] = seen.get(host, -1) + 1
        of_node = kinds.get(host, [])
        if len(set(of_node)) == 1 or at < len(of_node):
            found[rank] = of_node[min(at, len(of_node) - 1)]
    return found


def find_missing(
    attempt: AttemptSources,
    settings: Mapping[str, Sequence[Mapping[str, str]]],
    info: Mapping[str, str],
) -> MissingNodes | None:
    """Return the nodes without a log; None if all have one or their number is not known."""
    count, per = read_size(info, "NNODES") or 0, _count_ranks(info)
    logs = {node for node, _ in attempt.logs}
    printed = [
        {block["NODE_RANK"] for block in settings.get(node, ()) if "NODE_RANK" in block}
        for node in sorted(logs)
    ]
    indices = list_missing_nodes(printed, count)
    if not indices:
        return None
    ranks = tuple(rank for index in indices for rank in range(index * per, index * per + per))
    others = {node for node, _ in (*attempt.errors, *attempt.gpus)}
    names = tuple(sorted(others - logs)) if len(others - logs) == len(indices) else ()
    return MissingNodes(num_nodes=count, indices=indices, ranks=ranks, names=names)


def choose_job(attempt: AttemptSources) -> tuple[AttemptSources, tuple[OtherJob, ...]]:
    """Return the job with the most logs in a folder, the newest among equals, and the others."""
    owners = {}
    for node, path in attempt.logs:
        head = _read_head(path)
        own = [head["NODE_RANK"]] if "NODE_RANK" in head else []
        owners[node] = LogOwner(head.get("MASTER_ADDR", ""), own, path.stat().st_mtime)
    found = find_other_jobs(owners)
    others = {node for nodes in found.values() for node in nodes}

    def keep(files: Iterable[tuple[str, Path]]) -> tuple[tuple[str, Path], ...]:
        return tuple((node, path) for node, path in files if node not in others)

    kept = replace(
        attempt, logs=keep(attempt.logs), errors=keep(attempt.errors), gpus=keep(attempt.gpus)
    )
    return kept, tuple(OtherJob(master=master, nodes=nodes) for master, nodes in found.items())


def _read_head(path: Path) -> dict[str, str]:
    try:
        with open_file(path) as handle:
            text = handle.read(HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    found = (parse_job_info(line) for line in text.splitlines())
    return dict(pair for pair in found if pair is not None)

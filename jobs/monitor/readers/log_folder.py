"""Reader of a bare folder of per-node logs, as plain batch scripts leave it: no record, no plan.

log2/10932251/  n060.out n060.err n060.gpu  n061.out ...
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from varuna_core.records.files import as_whole, list_names
from varuna_core.records.logs.training_log import LogOwner, find_other_jobs, list_missing_nodes
from vjob.jobs.monitor.log_lines.errors import Classifier
from vjob.jobs.monitor.log_lines.many_files import ManyFiles
from vjob.jobs.monitor.model.snapshot import Disk, Node, Scheduler, Snapshot
from vjob.jobs.monitor.readers.file_systems import Skew, read_disks
from vjob.jobs.monitor.readers.node_files import (
    NodeFiles,
    choose_tail,
    count_lines,
    find_fatal,
    find_progress,
    poll_all,
    view_logs,
)
from vjob.jobs.monitor.readers.settings import compare, take_first

ENDINGS = {"out": "out", "err": "err", "gpu": "gpu", "gpu.jsonl": "gpu.jsonl", "log": "out"}
"""Suffixes of log file names and the kind of each."""
SLOW_EVERY_S = 10.0
_OURS = re.compile(r"record\.json|plan\.json|attempt-\d+")


def is_bare_folder(path: Path) -> bool:
    """Return True for a folder with logs of nodes that is not a run folder."""
    names = list_names(path)
    return any(map(_split, names)) and not any(map(_OURS.fullmatch, names))


def _split(name: str) -> tuple[str, str] | None:
    """Split a log's file name into node and kind."""
    stem, _, ending = name.rpartition(".")
    if ending == "jsonl":
        stem, _, first = stem.rpartition(".")
        ending = f"{first}.{ending}"
    kind = ENDINGS.get(ending)
    return (stem, kind) if kind and stem and not name.startswith(".") else None


class FolderReader:
    """Incremental reader of snapshots of one folder."""

    def __init__(
        self, folder: Path, *, num_lines: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._num_lines, self._clock = folder, num_lines, clock
        self._classifier, self._many = Classifier(), ManyFiles()
        self._files: dict[str, NodeFiles] = {}
        self._nodes: dict[str, Node] = {}
        self._seen: int | None = None
        self._skew = Skew()
        self._disks: tuple[Disk, ...] = ()
        self._disks_at = float("-inf")
        self._last: Snapshot | None = None

    def read(self) -> Snapshot:
        """Return a snapshot of the folder's present state."""
        is_changed = self._find_files()
        newest: list[float] = []
        for files, is_new in poll_all([*self._files.values()], self._many):
            if is_new or files.name not in self._nodes:
                is_changed = True
                newest += [files.newest] if files.newest else []
                self._nodes[files.name] = files.build_node(self._num_lines)
        ours = self._clock()
        self._skew.note(max(newest, default=None), ours)
        now = ours + self._skew.offset_s
        if abs(now - self._disks_at) >= SLOW_EVERY_S:
            self._disks, self._disks_at = read_disks({"logs": self._folder}), now
        if self._last is None or is_changed:
            self._last = self._build(now)
        skew = self._skew.worth_saying
        return replace(self._last, now=now, disks=self._disks, clock_skew_s=skew)

    def count_lines(self, nodes: Collection[str]) -> Mapping[str, Mapping[str, int]]:
        """Count the lines of these nodes' logs, by kind."""
        return count_lines(self._files, nodes)

    def _find_files(self) -> bool:
        try:
            mark = os.stat(self._folder).st_mtime_ns
        except OSError:
            return False
        if mark == self._seen:
            return False
        found: dict[str, dict[str, str]] = {}
        for name in list_names(Path(self._folder)):
            split = _split(name)
            if split is not None:
                found.setdefault(split[0], {})[split[1]] = os.path.join(self._folder, name)
        tail_bytes = choose_tail(sum(map(len, found.values())))
        for node in sorted(found, key=_natural):
            files = found[node]
            if node in self._files:
                self._files[node].add(files)
            else:
                self._files[node] = NodeFiles(
                    node, files, self._classifier, tail_bytes, self._num_lines
                )
        self._seen = mark
        return True

    def _build(self, now: float) -> Snapshot:
        others = self._find_others()
        left_out = {name for names in others.values() for name in names}
        nodes = [files for name, files in self._files.items() if name not in left_out]
        echoes = compare(nodes, {})
        view = replace(
            view_logs(nodes, find_progress(nodes)),
            nodes=tuple(self._nodes[name] for name in self._files),
            fatal=find_fatal(nodes),
        )
        return Snapshot(
            **vars(view),
            now=now,
            run=str(self._folder),
            folder=str(self._folder),
            scheduler=Scheduler(name=""),
            echoes=echoes,
            info=take_first(echoes),
            without_log=_find_missing(nodes, take_first(echoes)),
            other_jobs=others,
        )

    def _find_others(self) -> dict[str, tuple[str, ...]]:
        logs = {name: x.logs["out"] for name, x in self._files.items() if "out" in x.logs}
        owners = {}
        for name, log in logs.items():
            line = log.info.get("MASTER_ADDR")
            master = line.text.partition(":")[2].strip() if line is not None else ""
            owners[name] = LogOwner(master, log.node_ranks, log.tail.mtime)
        return find_other_jobs(owners)


def _find_missing(nodes: Iterable[NodeFiles], info: Mapping[str, str]) -> tuple[int, ...]:
    said = info.get("NNODES", "")
    num_nodes = as_whole(said) or 0
    printed = [files.logs["out"].node_ranks for files in nodes if "out" in files.logs]
    return list_missing_nodes(printed, num_nodes)


def _natural(name: str) -> list[str]:
    return [part.zfill(12) for part in re.split(r"(\d+)", name)]

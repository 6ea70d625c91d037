"""The log files of one node together."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from vjob.jobs.monitor.log_lines.sift import Classifier
from vjob.jobs.monitor.log_lines.tails import TAIL_BYTES, Tail
from vjob.jobs.monitor.model.snapshot import Gpu
from vjob.jobs.monitor.readers.gpu_logs import FIRST_BYTES, GpuSamples
from vjob.jobs.monitor.readers.node_logs import LogFile

FIRST_LOOK_BYTES = 24 * 1024 * 1024
"""Of all files together, at their first look."""
COUNTED_BYTES = 128 * 1024 * 1024
"""Of logs whose lines are counted."""
LEAST_BYTES = 8 * 1024
"""Of one file, however many there are."""


def choose_tail(num_files: int) -> int:
    """How much of each file a first look reads."""
    return max(LEAST_BYTES, min(TAIL_BYTES, FIRST_LOOK_BYTES // max(1, num_files)))


class NodeFiles:
    """<node>.out .err .gpu and .gpu.jsonl."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, str],
        classifier: Classifier,
        tail_bytes: int,
        num_lines: int,
    ) -> None:
        """`files` are paths by kind: out, err, gpu, gpu.jsonl; those that are there."""
        self.name = name
        self.logs: dict[str, LogFile] = {}
        self.gpus: dict[str, GpuSamples] = {}
        self._classifier, self._tail_bytes = classifier, tail_bytes
        self._num_lines = num_lines
        self.add(files)

    def add(self, files: Mapping[str, str]) -> None:
        """Files that came since."""
        for kind, path in files.items():
            if kind in ("out", "err") and kind not in self.logs:
                self.logs[kind] = LogFile(
                    path,
                    self.name,
                    os.path.basename(path),
                    self._classifier,
                    self._tail_bytes,
                    self._num_lines,
                )
            elif kind.startswith("gpu") and kind not in self.gpus:
                share = 2 if kind == "gpu.jsonl" else 10
                some = min(FIRST_BYTES, self._tail_bytes // share)
                self.gpus[kind] = GpuSamples(path, tail_bytes=some)

    def look(self) -> bool:
        """Whether anything is new."""
        is_new = False
        for log in self.logs.values():
            is_new = log.look() or is_new
        for samples in self.gpus.values():
            is_new = samples.look() or is_new
        return is_new

    @property
    def newest(self) -> float | None:
        """When anything was last written to .out or .err."""
        times = [log.tail.mtime for log in self.logs.values() if log.tail.mtime]
        return max(times, default=None)

    def last_lines(self, kind: str, count: int) -> tuple[str, ...]:
        source = self.logs.get(kind) or self.gpus.get(kind)
        return source.last_lines(count) if source is not None else ()

    def sizes(self) -> dict[str, int]:
        tails = self.tails()
        return {kind: tails[kind].size for kind in ("out", "err", "gpu") if kind in tails}

    def problems(self) -> dict[str, str]:
        tails = self.tails().values()
        return {Path(tail.path).name: tail.problem for tail in tails if tail.problem}

    def tails(self) -> dict[str, Tail]:
        """The end of each file, by kind."""
        logs = {kind: log.tail for kind, log in self.logs.items()}
        return logs | {kind: samples.tail for kind, samples in self.gpus.items()}

    @property
    def samples(self) -> GpuSamples | None:
        """Those that tell more."""
        for kind in ("gpu.jsonl", "gpu"):
            found = self.gpus.get(kind)
            if found is not None and found.at is not None:
                return found
        return None

    def list_gpus(self, ours: Collection[int]) -> tuple[Gpu, ...]:
        samples = self.samples
        return samples.list_gpus(ours) if samples is not None else ()


def count_lines(
    files: Mapping[str, NodeFiles], names: Collection[str]
) -> dict[str, dict[str, int]]:
    """Lines of the logs of these nodes, by kind; none where there is too much to read."""
    tails = {name: files[name].tails() for name in names if name in files}
    if sum(tail.size for held in tails.values() for tail in held.values()) > COUNTED_BYTES:
        return {}
    return {
        name: {kind: _count(held[kind].path) for kind in ("out", "err", "gpu") if kind in held}
        for name, held in tails.items()
    }


def _count(path: str) -> int:
    count = 0
    try:
        with open(path, "rb", buffering=0) as handle:
            while block := handle.read(1 << 20):
                count += block.count(b"\n")
    except OSError:
        return count
    return count

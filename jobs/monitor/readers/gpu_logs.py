"""Reader of one node's GPU samples: the agent's JSON lines, or text as gpustat prints it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import parse_fault
from varuna_core.records.files import as_number, parse_json
from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.gpu_text import (
    CPU,
    find_lines,
    read_index,
    read_line,
    read_utilization,
    render_sample,
)
from vjob.jobs.monitor.log_lines.tails import Added, Tail, show
from vjob.jobs.monitor.model.snapshot import Gpu

NUM_HISTORY = 60
FIRST_BYTES = 8 * 1024
MORE_BYTES = 64 * 1024
"""Bytes of the end of a file that are read if the usual first poll found no complete sample."""
NUM_SHOWN = 50
LATE_SAMPLES, LATE_S = 12, 60.0
"""A sampler that is late by this many samples plus this many seconds hangs in its driver."""


def describe_late(at: float | None, beat_at: float | None, every_s: float) -> str:
    """Explain why the last sample is out of date, although its agent still sends heartbeats; empty
    if it is not."""
    if at is None or beat_at is None or beat_at - at <= LATE_SAMPLES * every_s + LATE_S:
        return ""
    return f"no sample for {format_duration(beat_at - at)}, although the node's agent is alive"


class GpuSamples:
    """The last sample of each GPU of a node, and its earlier utilization."""

    def __init__(self, path: Path | str, *, tail_bytes: int = FIRST_BYTES) -> None:
        self.tail = Tail(path, tail_bytes=tail_bytes)
        self.at: float | None = None
        self.cpu_percent: float | None = None
        self.memory_used_mb: float | None = None
        self.memory_total_mb: float | None = None
        self._is_json = str(path).endswith(".jsonl")
        self._last: dict[str, dict[str, Any] | re.Match[str]] = {}
        """The last sample of each GPU, keyed by index; a match of a text line is converted on
        use."""
        self._history: dict[str, deque[float | None]] = {}
        self._sample: dict[str, Any] = {}
        self.not_known = ""
        """Why no GPU could be read in the last sample."""
        self.lost: tuple[int, ...] = ()
        """GPUs that the driver could not reach in the last sample."""
        self.faults: tuple[Finding, ...] = ()
        """Hardware faults as of the last sample."""
        self._note = ""
        """The agent's note on its readings."""
        self._shown: deque[bytes] = deque(maxlen=NUM_SHOWN)

    def poll(self) -> bool:
        """Read the samples that were added to the log; return True if there are any."""
        added = self.tail.poll()
        if added is None:
            return False
        self._read(added)
        if added.is_anew and added.num_skipped and not self._is_whole():
            self.tail = Tail(self.tail.path, tail_bytes=MORE_BYTES)
            if (added := self.tail.poll()) is not None:
                self._read(added)
        return True

    def _is_whole(self) -> bool:
        """Return True if a complete sample was read; in text, once a GPU occurs again."""
        if self._is_json:
            return self.at is not None
        return any(len(history) > 1 for history in self._history.values())

    def _read(self, added: Added) -> None:
        if added.is_anew:
            self._last, self._history = {}, {}
            self._shown.clear()
        lines = added.data.split(b"\n")[:-1]
        self._shown.extend(lines[-NUM_SHOWN:])
        if self._is_json:
            for line in lines[-NUM_HISTORY:]:
                self._read_sample(line)
        else:
            self._read_text(added.data.decode(errors="replace"))
            self.at = self.tail.mtime

    def last_lines(self, count: int) -> tuple[str, ...]:
        if count <= 0:
            return ()
        shown = [line for line in self._shown if line.strip()]
        if self._is_json:
            try:
                shown = render_sample(self._sample).encode().splitlines() if self._sample else []
            except (KeyError, TypeError, ValueError):
                shown = []
            shown = shown or [self._note.encode()] * bool(self._note)
        return tuple(show(line) for line in shown[-count:])

    def list_gpus(self, ours: Collection[int]) -> tuple[Gpu, ...]:
        """Return the last sample of each GPU; `ours` are the pids of the node's ranks."""
        keys = sorted(self._last, key=lambda key: (len(key), key))
        found = []
        for key in keys:
            sample, history = self._last[key], self._history[key]
            if isinstance(sample, re.Match):
                found.append(_read_match(sample, history))
            else:
                found.append(_make_gpu(sample, history, ours))
        return tuple(found)

    def _read_sample(self, line: bytes) -> None:
        try:
            value = parse_json(line)
            self._note = str(value.get("note", ""))[:200] or self._note
            at = as_number(value["time"])
            gpus = [gpu for gpu in value["gpus"] if isinstance(gpu, dict)]
        except (TypeError, KeyError, AttributeError):
            return
        if at is None:
            return
        self.at, self._sample = at, value
        self.cpu_percent = as_number(value.get("cpu_percent"))
        self.memory_used_mb = as_number(value.get("memory_used_mb"))
        self.memory_total_mb = as_number(value.get("memory_total_mb"))
        self.not_known = str(value.get("gpus_not_known", ""))[:200]
        lost = value.get("gpus_lost")
        self.lost = tuple(x for x in lost if isinstance(x, int)) if isinstance(lost, list) else ()
        faults = value.get("faults")
        listed = faults if isinstance(faults, list) else ()
        parsed = (parse_fault(one) for one in listed if isinstance(one, dict))
        self.faults = tuple(one for one in parsed if one is not None)
        self._last = {}
        for gpu in gpus:
            self._keep(str(gpu.get("index", "")), gpu)

    def _read_text(self, text: str) -> None:
        for match in find_lines(text):
            index = read_index(match)
            self._last[index] = match
            history = self._history.get(index)
            if history is None:
                history = self._history[index] = deque(maxlen=NUM_HISTORY)
            history.append(read_utilization(match))
        cpu = self._last.pop(CPU, None)
        if isinstance(cpu, re.Match):
            row = read_line(cpu)
            self.cpu_percent = row.utilization
            self.memory_used_mb, self.memory_total_mb = row.memory_used_mb, row.memory_total_mb

    def _keep(self, index: str, sample: dict[str, Any]) -> None:
        self._last[index] = sample
        history = self._history.setdefault(index, deque(maxlen=NUM_HISTORY))
        history.append(as_number(sample.get("utilization")))


def _read_match(match: re.Match[str], history: Collection[float | None]) -> Gpu:
    line = read_line(match)
    return Gpu(
        index=line.index,
        name=line.name,
        utilization=line.utilization,
        memory_used_mb=line.memory_used_mb,
        memory_total_mb=line.memory_total_mb,
        temperature=line.temperature,
        num_processes=line.num_processes,
        history=tuple(history),
    )


def _make_gpu(
    sample: Mapping[str, Any], history: Collection[float | None], ours: Collection[int]
) -> Gpu:
    pids = sample.get("processes")
    count, foreign = sample.get("num_processes"), None
    if isinstance(pids, list):
        count = len(pids)
        own = {pid for pid in pids if pid in ours}
        if own or not pids:  # else pids of another namespace: they tell nothing about each other
            foreign = len(pids) - len(own)
    ranks = sample.get("ranks")
    errors, throttle = sample.get("ecc_errors"), sample.get("throttle")
    if isinstance(throttle, list):
        throttle = ", ".join(map(str, throttle))
    return Gpu(
        index=str(sample.get("index", ""))[:20],
        name=str(sample.get("name", ""))[:80],
        utilization=as_number(sample.get("utilization")),
        memory_used_mb=as_number(sample.get("memory_used_mb")),
        memory_total_mb=as_number(sample.get("memory_total_mb")),
        temperature=as_number(sample.get("temperature")),
        power_w=as_number(sample.get("power_w")),
        num_processes=count if isinstance(count, int) else None,
        num_foreign=foreign,
        ecc_errors=errors if isinstance(errors, int) else None,
        throttle=str(throttle)[:80] if throttle else "",
        history=tuple(history),
        ranks=tuple(x for x in ranks if isinstance(x, int)) if isinstance(ranks, list) else (),
    )

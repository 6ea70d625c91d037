"""GPU sampler: a thread that writes JSON lines.

It never disturbs the training: whatever goes wrong is counted and told in the log, not raised.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Dict, List, Set

from varuna_core.agent.gpu.gauges import Cpu, GpuReader, open_gpus, read_memory_mb, read_swap_mb
from varuna_core.agent.processes.output import Sink
from varuna_core.agent.processes.proc import sees_machine
from varuna_core.agent.setup.ranks import map_devices, split_devices
from varuna_core.agent.setup.site import Site
from varuna_core.records.plan import GroupPlan


class Sampler(threading.Thread):
    """Samples every `timing.sample_s` until `end`.

    `list_own` gives the pids of all that runs here because of the attempt.
    """

    def __init__(self, site: Site, list_own: Callable[[], Set[int]]) -> None:
        super().__init__(name="sampler", daemon=True)
        self.num_errors = 0
        self._every_s = site.plan.timing.sample_s
        self._wants_gpus = site.node.group.gpus > 0
        self._lines = Sink(site.attempt.node_log(site.host, "gpu.jsonl"))
        self._cpu = Cpu()
        self._indices = find_indices(site.node.group, site.env.get("CUDA_VISIBLE_DEVICES"))
        self._list_own = list_own
        self._own: Set[int] = set()
        self._ended = threading.Event()

    def run(self) -> None:
        gpus: GpuReader | None = None
        why = "the plan has none here"
        if self._wants_gpus:
            gpus, why = open_gpus()
        if gpus is None:
            self._note(f"no GPU readings ({why}): processors and memory only")
        while not self._ended.is_set():
            try:
                self._sample(gpus)
            except Exception as error:  # a driver may fail in any way; training goes on
                self._count_error(error)
            self._ended.wait(self._every_s)

    def end(self) -> None:
        self._ended.set()
        self.join(2)

    def _sample(self, gpus: GpuReader | None) -> None:
        readings = gpus() if gpus is not None else []
        self._count_foreign(readings)
        used, total = read_memory_mb()
        sample = {
            "time": round(time.time(), 3),
            "gpus": readings,
            "num_cpus": self._cpu.count,
            "cpu_percent": self._cpu.read_percent(),
            "memory_used_mb": used,
            "memory_total_mb": total,
            "swap_used_mb": read_swap_mb(),
            "errors": self.num_errors,
        }
        self._lines.write(json.dumps(sample).encode() + b"\n")

    def _count_foreign(self, readings: List[Dict[str, Any]]) -> None:
        """Mark each of our GPUs with the number of processes on it that are not ours."""
        before, self._own = self._own, set()
        if any(gpu["processes"] for gpu in readings):
            self._own = self._list_own()
        tells = sees_machine()
        for gpu in readings:
            held, ours = gpu["processes"], self._indices is None or gpu["index"] in self._indices
            gpu["foreign"] = None
            if held is not None and ours and tells:
                # One of ours may have ended since the driver named it.
                gpu["foreign"] = len(set(held) - self._own - before)

    def _count_error(self, error: Exception) -> None:
        self.num_errors += 1
        if self.num_errors in (1, 10, 100, 1000):
            self._note(f"{self.num_errors} readings failed, last: {error}")

    def _note(self, text: str) -> None:
        line = json.dumps({"time": round(time.time(), 3), "note": text})
        self._lines.write(line.encode() + b"\n")


def find_indices(group: GroupPlan, visible: str | None) -> Set[int] | None:
    """The driver's numbers of the GPUs that the ranks use; None where nothing tells."""
    mapped = map_devices(group, visible)
    names = split_devices((mapped if mapped is not None else visible) or "")
    if not names or not all(name.isdigit() for name in names):
        return None
    return {int(name) for name in names}

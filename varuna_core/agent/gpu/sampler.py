"""GPU sampler: a thread that writes JSON lines.

It never disturbs the training: whatever goes wrong is counted and told in the log, not raised.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set

from varuna_core.agent.gpu.accelerator import Accelerator
from varuna_core.agent.gpu.gauges import Cpu, read_memory_mb, read_swap_mb
from varuna_core.agent.processes.output import Sink
from varuna_core.agent.processes.proc import sees_machine
from varuna_core.facts.known import NotKnown, Value


class Sampler(threading.Thread):
    """Writes a sample to `path` every `every_s` until `end`; without an accelerator, of processors
    and memory only.

    `indices` are the driver's numbers of our GPUs, None where nothing tells; `list_own` gives the
    pids of all that runs here because of the attempt.
    """

    def __init__(
        self,
        path: Path,
        every_s: float,
        accelerator: Optional[Accelerator],
        indices: Optional[Set[int]],
        list_own: Callable[[], Set[int]],
    ) -> None:
        super().__init__(name="sampler", daemon=True)
        self.num_errors = 0
        self._every_s = every_s
        self._accelerator = accelerator
        self._lines = Sink(path)
        self._cpu = Cpu()
        self._indices = indices
        self._list_own = list_own
        self._own: Set[int] = set()
        self._told = ""
        """The last reason why GPUs could not be read."""
        self._ended = threading.Event()

    def run(self) -> None:
        if self._accelerator is None:
            self._note("no GPU readings (the plan has none here): processors and memory only")
        while not self._ended.is_set():
            try:
                self._sample()
            except Exception as error:  # a driver may fail in any way; training goes on
                self._count_error(error)
            self._ended.wait(self._every_s)

    def end(self) -> None:
        self._ended.set()
        self.join(2)

    def _sample(self) -> None:
        gpus = {"gpus": []} if self._accelerator is None else self._read_gpus(self._accelerator)
        used, total = read_memory_mb()
        sample = {
            "time": round(time.time(), 3),
            **gpus,
            "num_cpus": self._cpu.count,
            "cpu_percent": self._cpu.read_percent(),
            "memory_used_mb": used,
            "memory_total_mb": total,
            "swap_used_mb": read_swap_mb(),
            "errors": self.num_errors,
        }
        self._lines.write(json.dumps(sample).encode() + b"\n")

    def _read_gpus(self, accelerator: Accelerator) -> Dict[str, Any]:
        """Fields of the sample about GPUs: `gpus`, and what is not known of them.

        `gpus_not_known` is the reason where none could be read, `gpus_lost` the numbers of ours
        that the driver has and cannot reach.
        """
        found = accelerator.sample()
        if isinstance(found, NotKnown):
            if found.reason != self._told:
                self._told = found.reason
                self._note(f"GPUs not read: {found.reason}")
            self.num_errors += 1
            return {"gpus": [], "gpus_not_known": found.reason}
        self._told = ""
        held = accelerator.processes()
        by_uuid = held.value if isinstance(held, Value) else {}
        readings = [one.as_json(by_uuid.get(one.uuid)) for one in found.value]
        self._count_foreign(readings)
        missing = {index for one in accelerator.health() for index in one.values.get("missing", ())}
        lost = sorted(missing if self._indices is None else missing & self._indices)
        return {"gpus": readings, **({"gpus_lost": lost} if lost else {})}

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

"""GPU sampler: a thread that writes JSON lines.

It never disturbs the training: whatever goes wrong is counted and told in the log, not raised.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from varuna_core.agent.gpu.accelerator import (
    CLOSE_LOOK,
    Accelerator,
    GpuSample,
    list_named,
)
from varuna_core.agent.gpu.faults import Faults
from varuna_core.agent.gpu.gauges import Cpu, read_memory_mb, read_swap_mb
from varuna_core.agent.gpu.networks import Networks
from varuna_core.agent.processes.output import Sink
from varuna_core.agent.processes.proc import sees_machine
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, dump_faults
from varuna_core.facts.known import NotKnown, Sure, Value


class Sampler(threading.Thread):
    """Writes a sample to `path` every `every_s` seconds until `end`; without an accelerator, a
    sample has only processors and memory.

    `names` are the names of our GPUs in the variable of visible devices, None if not known;
    `list_own` returns the pids of all processes that run here because of the attempt, `find_ranks`
    the pid of each rank.
    """

    def __init__(
        self,
        path: Path,
        every_s: float,
        accelerator: Optional[Accelerator],
        names: Optional[Sequence[str]],
        list_own: Callable[[], Set[int]],
        find_ranks: Callable[[], Mapping[int, Optional[int]]],
        faults: Optional[Faults] = None,
    ) -> None:
        super().__init__(name="sampler", daemon=True)
        self.num_errors = 0
        self._every_s = every_s
        self._accelerator = accelerator
        self._lines = Sink(path)
        self._cpu = Cpu()
        self._names = names
        self._list_own, self._find_ranks = list_own, find_ranks
        self._faults = faults or Faults(networks=Networks(every_s=CLOSE_LOOK * every_s))
        self._ranks: Dict[str, Tuple[Sequence[int], Sure]] = {}
        """Ranks that use each GPU, as last known, and how surely."""
        self._own: Set[int] = set()
        self._not_known: Optional[NotKnown] = None
        """The last reason why GPUs could not be read."""
        self._ended = threading.Event()

    def run(self) -> None:
        if self._accelerator is None:
            self._note("no GPU readings (the plan has no GPUs here): processors and memory only")
        while not self._ended.is_set():
            try:
                self.sample()
            except Exception as error:  # a driver may fail in any way; training goes on
                self._count_error(error)
            self._ended.wait(self._every_s)

    def end(self) -> None:
        self._ended.set()
        self.join(2)

    def sample(self) -> None:
        """Write one sample of the node's GPUs, memory and faults."""
        now = time.time()
        gpus: Dict[str, Any] = {"gpus": []}
        samples: Sequence[GpuSample] = ()
        if self._accelerator is not None:
            gpus, samples = self._read_gpus(self._accelerator)
        faults = [
            self._name_ranks(one)
            for one in self._faults.list_faults(self._accelerator, samples, now)
            if self._is_ours(one)
        ]
        lost = sorted({int(one.values["part"]) for one in faults if one.rule == Fault.LOST.value})
        used, total = read_memory_mb()
        sample = {
            "time": round(now, 3),
            **gpus,
            **({"gpus_lost": lost} if lost else {}),
            **({"faults": dump_faults(faults)} if faults else {}),
            "num_cpus": self._cpu.count,
            "cpu_percent": self._cpu.read_percent(),
            "memory_used_mb": used,
            "memory_total_mb": total,
            "swap_used_mb": read_swap_mb(),
            "errors": self.num_errors,
        }
        self._lines.write(json.dumps(sample).encode() + b"\n")

    def _read_gpus(self, accelerator: Accelerator) -> Tuple[Dict[str, Any], Sequence[GpuSample]]:
        """Return the sample's fields about GPUs, and the samples of the GPUs that this job's
        processes use.

        The field `gpus` lists those GPUs; `gpus_not_known` is the reason if none could be read.
        """
        found = accelerator.sample()
        if isinstance(found, NotKnown):
            if found != self._not_known:
                self._not_known = found
                self._note(f"GPUs not read: {found.reason}")
            self.num_errors += 1
            return {"gpus": [], "gpus_not_known": found.reason}, ()
        self._not_known = None
        held = accelerator.processes()
        by_uuid = held.value if isinstance(held, Value) else {}
        ours = self._choose_ours(found.value)
        before, self._own = self._own, set()
        if any(by_uuid.get(one.uuid) for one in ours):
            self._own = self._list_own()
        self._assign_ranks(ours, by_uuid)
        readings = []
        for one in ours:
            pids = by_uuid.get(one.uuid)
            gpu = one.as_json(pids)
            ranks, sure = self._ranks.get(one.key, ((), Sure.INFERRED))
            gpu["ranks"] = list(ranks) if sure is Sure.MEASURED else None
            gpu["foreign"] = None
            if pids is not None and sees_machine():
                # One of ours may have ended since the driver named it.
                gpu["foreign"] = len(set(pids) - self._own - before)
            readings.append(gpu)
        return {"gpus": readings}, ours

    def _choose_ours(self, samples: Sequence[GpuSample]) -> List[GpuSample]:
        """Return the devices that the ranks may use: all if none are known or named."""
        chosen = [one for name in self._names or () for one in list_named(name, samples)]
        return sorted(set(chosen), key=lambda one: (one.index, one.slice or 0)) or list(samples)

    def _assign_ranks(
        self, ours: Sequence[GpuSample], by_uuid: Mapping[str, Sequence[int]]
    ) -> None:
        mains = self._find_ranks()
        pids = {pid: rank for rank, pid in mains.items() if pid is not None}
        in_order = [one.key for name in self._names or () for one in list_named(name, ours)] or [
            one.key for one in ours
        ]
        for one in ours:
            ranks = sorted({pids[pid] for pid in by_uuid.get(one.uuid) or () if pid in pids})
            if ranks:
                self._ranks[one.key] = ranks, Sure.MEASURED
        for key, rank in zip(in_order, sorted(mains)):  # noqa: B905
            if len(in_order) == len(mains):  # each rank takes the next one, most often
                self._ranks.setdefault(key, ([rank], Sure.INFERRED))

    def _is_ours(self, fault: Finding) -> bool:
        """Return True if a fault may affect our ranks: every fault but those of GPUs that other
        jobs use."""
        part = fault.values["part"]
        if not fault.rule.startswith("gpu-") or self._names is None:
            return True
        known = any(key.partition(":")[0] == part for key in self._ranks)
        return known or part in self._names or not all(map(str.isdecimal, self._names))

    def _name_ranks(self, fault: Finding) -> Finding:
        part = fault.values["part"]
        held = [
            ranks
            for key, ranks in self._ranks.items()
            if fault.rule.startswith("gpu-") and part in (key, key.partition(":")[0])
        ]
        if not held:
            return fault
        ranks = sorted({rank for some, _ in held for rank in some})
        sure = all(sure is Sure.MEASURED for _, sure in held)
        values = {**fault.values, "ranks": ranks, "ranks_sure": sure}
        return replace(fault, values=values)

    def _count_error(self, error: Exception) -> None:
        self.num_errors += 1
        if self.num_errors in (1, 10, 100, 1000):
            self._note(f"{self.num_errors} readings failed, last: {error}")

    def _note(self, text: str) -> None:
        line = json.dumps({"time": round(time.time(), 3), "note": text})
        self._lines.write(line.encode() + b"\n")

"""Faults of a node's GPUs, networks and memory since the attempt began, with their times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from varuna_core.agent.gpu.accelerator import Accelerator, GpuSample
from varuna_core.agent.gpu.networks import Networks
from varuna_core.agent.processes.kernel_log import KernelLog
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, make_fault

MOST = 40
"""Most faults that a sample contains."""


class Faults:
    """Collects the faults of a node from the driver, the kernel's log and the counters."""

    def __init__(self, kernel: Optional[KernelLog] = None, networks: Optional[Networks] = None):
        self._kernel = kernel or KernelLog()
        self._networks = networks or Networks()
        self._addresses: Dict[str, str] = {}
        """Numbers of the GPUs, keyed by PCI address."""
        self._ecc: Dict[str, int] = {}
        """Number of uncorrected memory errors that each GPU had at its first sample."""
        self._lines: Dict[Tuple[str, str, Any], Finding] = {}
        """Faults that lines of the kernel's log reported."""
        self._times: Dict[Tuple[str, str, Any], Tuple[float, float, Optional[int]]] = {}
        """For each fault: the time when it was first seen, the time when its count last grew (or,
        without a count, when it was last seen), and its last count."""

    def list_faults(
        self,
        accelerator: Optional[Accelerator],
        samples: Sequence[GpuSample],
        now: float,
    ) -> List[Finding]:
        """Return the faults as of now, the earliest first."""
        found: Dict[Tuple[str, str, Any], Finding] = {}
        states = () if accelerator is None else accelerator.health()
        self._read_kernel(accelerator, samples)
        every = (
            *states,
            *self._lines.values(),
            *self._count_ecc(samples),
            *self._networks.read(now),
        )
        for one in every:
            key = (one.rule, one.values["part"], _find_kind(one))
            count = one.values.get("count")
            known = found.get(key)
            if known is None or (count or 0) > (known.values.get("count") or 0):
                found[key] = one
        dated = [self._date(key, one, now) for key, one in found.items()]
        return sorted(dated, key=lambda one: float(one.values["since"]))[:MOST]

    def _date(self, key: Tuple[str, str, Any], fault: Finding, now: float) -> Finding:
        count = fault.values.get("count")
        since, last, before = self._times.get(key, (now, now, None))
        last = now if count is None or count != before else last
        self._times[key] = since, last, count
        times = {"since": round(since, 1), "last": round(last, 1)}
        return replace(fault, values={**fault.values, **times})

    def _count_ecc(self, samples: Sequence[GpuSample]) -> Iterable[Finding]:
        for one in samples:
            if one.ecc_errors is not None:
                grown = one.ecc_errors - self._ecc.setdefault(one.key, one.ecc_errors)
                if grown > 0:
                    yield make_fault(Fault.ECC, one.key, count=grown, source="driver")

    def _read_kernel(
        self, accelerator: Optional[Accelerator], samples: Sequence[GpuSample]
    ) -> None:
        parse = getattr(accelerator, "parse_kernel_line", None)  # a plug-in's may be an older one
        self._addresses.update((one.address, str(one.index)) for one in samples if one.address)
        for _, line in self._kernel.read_records():
            fault = parse(line) if parse is not None else None
            if fault is None:
                continue
            part = self._addresses.get(fault.values["part"])
            if part is None:  # another job's, or not known yet whose
                continue
            key = (fault.rule, part, _find_kind(fault))
            count = 1 + (self._lines[key].values["count"] if key in self._lines else 0)
            values: Mapping[str, Any] = {**fault.values, "part": part, "count": count}
            self._lines[key] = replace(fault, values=values)


def _find_kind(fault: Finding) -> Any:
    """Return the value by which faults of the same rule and part are told apart: the driver's
    number for the fault, or else its `detail`."""
    return fault.values.get("code") or fault.values.get("detail")

"""Intel's data center GPUs (Max and Flex), by xpu-smi.

A node with no more than the graphics of its processors has no xpu-smi, and so no accelerator here.
Columns are found by their headings: versions of xpu-smi print other columns as N/A, or leave them
out.
"""

from __future__ import annotations

import csv
import shutil
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from varuna_core.agent.gpu.accelerator import (
    GpuSample,
    describe_silence,
    make_lost_findings,
    parse_number,
)
from varuna_core.agent.processes.process import run
from varuna_core.facts.finding import Finding
from varuna_core.facts.known import Evidence, Known, NotKnown, Value
from varuna_core.plugins import API

XPU_SMI = "xpu-smi"
SAMPLE_S, COUNT_S = 15.0, 20.0
LIST = ("discovery", "--dump", "1,2,16")
"""Arguments of xpu-smi that print number, name and memory of each device."""
METRICS = ("dump", "-d", "-1", "-m", "0,1,3,18,30", "-n", "1")
"""Arguments of xpu-smi that print, once, load, power, temperature, memory and uncorrectable memory
errors of each device."""
DEVICE, NAME, MEMORY = "Device ID", "Device Name", "Memory Physical Size"


class IntelAccelerator:
    """The Intel data center GPUs of this node."""

    API = API
    name = "intel"
    visible_variable = "ZE_AFFINITY_MASK"
    smi_command = " ".join((XPU_SMI, *METRICS))

    def __init__(self) -> None:
        self._devices: Dict[int, Tuple[str, Optional[float]]] = {}
        """Name and memory of each device by its number, once xpu-smi has printed them."""
        self._findings: Tuple[Finding, ...] = ()

    def is_here(self) -> bool:
        return shutil.which(XPU_SMI) is not None

    def count(self) -> Known[int]:
        text = _ask(LIST, COUNT_S)
        if isinstance(text, NotKnown):
            return text
        self._devices = parse_devices(text.value)
        if not self._devices:
            return NotKnown(f"{XPU_SMI} lists no device", text.evidence)
        return Value(len(self._devices), (Evidence(f"{XPU_SMI} {LIST[0]}"),))

    def list_models(self) -> Sequence[str]:
        return [name for name, _ in self._devices.values()]

    def sample(self) -> Known[Sequence[GpuSample]]:
        if not self._devices:
            self.count()
        text = _ask(METRICS, SAMPLE_S)
        found = text if isinstance(text, NotKnown) else parse_metrics(text.value, self._devices)
        self._findings = make_lost_findings(found)
        return found

    def processes(self) -> Known[Mapping[str, Sequence[int]]]:
        return NotKnown(f"processes are not read with {XPU_SMI}")

    def health(self) -> Sequence[Finding]:
        return self._findings

    def parse_kernel_line(self, text: str) -> Optional[Finding]:
        return None  # xpu-smi is not asked for addresses, by which the kernel names GPUs

    def parse_smi(self, text: str) -> Known[Sequence[GpuSample]]:
        return parse_metrics(text, {})


def parse_devices(text: str) -> Dict[int, Tuple[str, Optional[float]]]:
    """Return the name and the memory in MiB of each device, from `xpu-smi discovery --dump`."""
    found = {}
    for row in _read_table(text, DEVICE):
        index = row.get(DEVICE, "")
        if index.isdecimal() and len(index) < 5:
            memory = row.get(MEMORY, "").split()
            found[int(index)] = (row.get(NAME, ""), parse_number(memory[0]) if memory else None)
    return found


def parse_metrics(
    text: str, devices: Mapping[int, Tuple[str, Optional[float]]]
) -> Known[Sequence[GpuSample]]:
    """Return one sample of all GPUs from `xpu-smi dump`; `devices` are the expected devices."""
    found = {}
    for row in _read_table(text, "Timestamp"):
        index = row.get("DeviceId", "")
        if not index.isdecimal() or len(index) > 4:
            continue
        name, total = devices.get(int(index), ("Intel GPU", None))
        errors = _find_number(row, "GPU Memory Errors Uncorrectable")
        found[int(index)] = GpuSample(
            index=int(index),
            name=name,
            temperature=_find_number(row, "GPU Core Temperature"),
            utilization=_find_number(row, "GPU Utilization (%)"),
            memory_used_mb=_find_number(row, "GPU Memory Used (MiB)"),
            memory_total_mb=total,
            power_w=_find_number(row, "GPU Power (W)"),
            ecc_errors=None if errors is None else int(errors),
            uuid=index,
        )
    expected = max(len(devices), max(found, default=-1) + 1)
    evidence = Evidence(XPU_SMI, text=text[:400], seen=len(found), expected=expected)
    if not found:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "no answer")
        return NotKnown(f"{XPU_SMI}: {first[:200]}", (evidence,))
    return Value(tuple(found[index] for index in sorted(found)), (evidence,))


def _ask(words: Sequence[str], limit_s: float) -> Known[str]:
    program = shutil.which(XPU_SMI)
    if program is None:
        return NotKnown(f"{XPU_SMI} is not in PATH")
    result = run([program, *words], timeout_s=limit_s)
    said = f"{result.out}\n{result.err}".strip()
    if result.code == 0:
        return Value(result.out, (Evidence(XPU_SMI, text=said[:400]),))
    why = said.splitlines()[0] if said else describe_silence(result.code, limit_s)
    return NotKnown(f"{XPU_SMI} {words[0]}: {why}", (Evidence(XPU_SMI, text=said[:400]),))


def _find_number(row: Mapping[str, str], heading: str) -> Optional[float]:
    """Return the number in the first column whose heading begins with `heading`."""
    return next((parse_number(row[key]) for key in row if key.startswith(heading)), None)


def _read_table(text: str, first: str) -> List[Dict[str, str]]:
    """Return the rows below the heading whose first column is `first`, by column."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    heading: List[str] = []
    found = []
    for row in rows:
        words = [word.strip() for word in row]
        if words and words[0] == first:
            heading = words
        elif heading and len(words) == len(heading):
            found.append(dict(zip(heading, words)))  # noqa: B905
    return found

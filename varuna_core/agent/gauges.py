"""Readings of GPUs, processors and memory.

GPUs through pynvml where the node's python has it, else through nvidia-smi.
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any, Callable, Dict, List

from varuna_core.agent.process import run

GpuReader = Callable[[], List[Dict[str, Any]]]
"""One reading: a dict for each GPU."""

SMI_S = 10.0
SMI_QUERY = "index,name,temperature.gpu,utilization.gpu,memory.used,memory.total,power.draw"
KEYS = ("temperature", "utilization", "memory_used_mb", "memory_total_mb", "power_w")


def open_gpus() -> tuple[GpuReader | None, str]:
    """The reader, or None with the reason."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        nvml.nvmlDeviceGetCount()
        return lambda: _read_nvml(nvml), "pynvml"
    except Exception as error:  # no module, no driver library, or a driver that fails: same to us
        reason = f"pynvml: {error}"
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, f"{reason}; nvidia-smi is not in PATH"
    path = program
    return lambda: _read_smi(path), "nvidia-smi"


def parse_smi(text: str) -> list[dict[str, Any]]:
    """From `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; `[N/A]` becomes None."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 2 + len(KEYS) and words[0].isdigit():
            numbers = {key: _parse_number(words[at]) for at, key in enumerate(KEYS, start=2)}
            found.append({"index": int(words[0]), "name": words[1], **numbers})
    return found


class Cpu:
    """Load of all processors between two readings."""

    def __init__(self) -> None:
        self.count = os.cpu_count() or 1
        self._last: tuple[int, int] | None = None

    def read_percent(self) -> float | None:
        """None at the first reading: there is nothing to compare with."""
        with open("/proc/stat", encoding="ascii") as handle:
            ticks = [int(word) for word in handle.readline().split()[1:9]]
        now = (sum(ticks), ticks[3] + ticks[4])  # all, idle and waiting for disks
        last, self._last = self._last, now
        if last is None or now[0] <= last[0]:
            return None
        return round(100.0 * (1 - (now[1] - last[1]) / (now[0] - last[0])), 1)


def read_memory_mb() -> tuple[int, int]:
    """Used and total, as `free` counts them."""
    fields = {}
    with open("/proc/meminfo", encoding="ascii") as handle:
        for line in handle:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) // 1024
    return fields["MemTotal"] - fields["MemAvailable"], fields["MemTotal"]


def _read_smi(program: str) -> list[dict[str, Any]]:
    options = [f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"]
    result = run([program, *options], timeout_s=SMI_S)
    if result.code != 0:
        raise OSError(f"nvidia-smi: {(result.err or result.out).strip() or 'no answer'}")
    return parse_smi(result.out)


def _read_nvml(nvml: Any) -> list[dict[str, Any]]:
    return [_read_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _read_device(nvml: Any, index: int) -> dict[str, Any]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(device)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)

    def ask(function: Callable[[], float]) -> float | None:
        try:
            return function()
        except nvml.NVMLError:  # not every device has every gauge
            return None

    return {
        "index": index,
        "name": name.decode() if isinstance(name, bytes) else name,
        "temperature": ask(lambda: nvml.nvmlDeviceGetTemperature(device, 0)),
        "utilization": ask(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu),
        "memory_used_mb": memory.used // 2**20,
        "memory_total_mb": memory.total // 2**20,
        "power_w": ask(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000),
    }


def _parse_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None

"""Readings of GPUs, processors and memory.

GPUs through pynvml where the node's python has it, else through nvidia-smi.
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any, Callable, Dict, List, Optional, Sequence

from varuna_core.agent.processes.process import run

GpuReader = Callable[[], List[Dict[str, Any]]]
"""One reading: a dict for each GPU."""

SMI_S = 10.0
SMI_QUERY = "index,name,temperature.gpu,utilization.gpu,memory.used,memory.total,power.draw"
SMI_MORE = (
    "uuid,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.active",
    "uuid,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active",
    "",
)
"""What versions of nvidia-smi know beside, the newest first; one unknown field spoils a query."""
SMI_UNKNOWN = "not a valid field"
KEYS = ("temperature", "utilization", "memory_used_mb", "memory_total_mb", "power_w")

THROTTLES = {
    0x2: "app_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""The driver's bits for why a clock is held down; 1 is an idle GPU."""
NVML_REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)
UNCORRECTED, VOLATILE = 1, 0
"""NVML's numbers for errors that no check could mend, since the driver was loaded."""


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
    return Smi(program).read, "nvidia-smi"


class Smi:
    """nvidia-smi, asked for as much as its version knows."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._more = list(SMI_MORE)

    def read(self) -> list[dict[str, Any]]:
        while True:
            fields = ",".join(filter(None, (SMI_QUERY, self._more[0])))
            code, out, said = self._ask(f"--query-gpu={fields}")
            if code == 0:
                break
            if SMI_UNKNOWN not in said or len(self._more) == 1:
                raise OSError(f"nvidia-smi: {said or 'no answer'}")
            del self._more[0]
        processes = None
        if self._more[0]:
            code, held, _ = self._ask("--query-compute-apps=gpu_uuid,pid")
            processes = parse_smi_processes(held) if code == 0 else None
        return parse_smi(out, processes)

    def _ask(self, query: str) -> tuple[int | None, str, str]:
        result = run([self._program, query, "--format=csv,noheader,nounits"], timeout_s=SMI_S)
        return result.code, result.out, (result.err + result.out).strip()


def parse_smi(text: str, processes: Optional[Dict[str, List[int]]] = None) -> list[dict[str, Any]]:
    """From `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; `[N/A]` becomes None.

    `processes` are those of all GPUs, by their uuid; None where nothing tells.
    """
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) in (2 + len(KEYS), 5 + len(KEYS)) and words[0].isdigit():
            numbers = {key: _parse_number(words[at]) for at, key in enumerate(KEYS, start=2)}
            uuid, errors, reasons = words[2 + len(KEYS) :] or ("", "", "")
            found.append(
                {
                    "index": int(words[0]),
                    "name": words[1],
                    **numbers,
                    "processes": processes.get(uuid, []) if processes is not None else None,
                    "ecc_errors": int(errors) if errors.isdigit() else None,
                    "throttle": spell_throttle(_parse_bits(reasons)),
                }
            )
    return found


def parse_smi_processes(text: str) -> dict[str, list[int]]:
    """From `nvidia-smi --query-compute-apps=gpu_uuid,pid`: pids by the GPU's uuid."""
    found: Dict[str, List[int]] = {}
    for line in text.splitlines():
        uuid, _, pid = (word.strip() for word in line.partition(","))
        if pid.isdigit():
            found.setdefault(uuid, []).append(int(pid))
    return found


def spell_throttle(bits: int) -> str:
    """Words for why a GPU's clock is held down; empty for none, and for an idle one."""
    words = [word for bit, word in THROTTLES.items() if bits & bit]
    unknown = bits & ~sum(THROTTLES) & ~1
    return ", ".join([*words, *([hex(unknown)] if unknown else [])])


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
    fields = _read_meminfo()
    return fields["MemTotal"] - fields["MemAvailable"], fields["MemTotal"]


def read_swap_mb() -> int:
    """Of the node, what lies in swap."""
    fields = _read_meminfo()
    return fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)


def _read_meminfo() -> Dict[str, int]:
    fields = {}
    with open("/proc/meminfo", encoding="ascii") as handle:
        for line in handle:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) // 1024
    return fields


def _read_nvml(nvml: Any) -> list[dict[str, Any]]:
    return [_read_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _read_device(nvml: Any, index: int) -> dict[str, Any]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(device)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)

    def ask(names: Sequence[str], *words: int) -> Any:
        """The first of these functions that this binding and this driver have."""
        for name in names:
            try:
                return getattr(nvml, name)(device, *words)
            except (nvml.NVMLError, AttributeError):  # not every device has every gauge
                continue
        return None

    load = ask(["nvmlDeviceGetUtilizationRates"])
    power = ask(["nvmlDeviceGetPowerUsage"])
    held = ask(["nvmlDeviceGetComputeRunningProcesses"])
    return {
        "index": index,
        "name": name.decode() if isinstance(name, bytes) else name,
        "temperature": ask(["nvmlDeviceGetTemperature"], 0),
        "utilization": None if load is None else load.gpu,
        "memory_used_mb": memory.used // 2**20,
        "memory_total_mb": memory.total // 2**20,
        "power_w": None if power is None else power / 1000,
        "processes": None if held is None else [process.pid for process in held],
        "ecc_errors": ask(["nvmlDeviceGetTotalEccErrors"], UNCORRECTED, VOLATILE),
        "throttle": spell_throttle(ask(NVML_REASONS) or 0),
    }


def _parse_bits(word: str) -> int:
    try:
        return int(word, 16)
    except ValueError:
        return 0


def _parse_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None

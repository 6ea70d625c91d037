"""AMD's GPUs, by the files that the amdgpu driver keeps in /sys.

No tool of ROCm is started: amd-smi and rocm-smi read the same files, take a second each time, and
change their output between versions. The compute driver (KFD) lists the GPUs in the order in which
ROCm numbers them, and leaves out those that the job's control group closes.

A GPU in partitions (the modes DPX, QPX and CPX of an MI300) is several devices that share one set
of gauges. Load and memory are then not known of each, and the first one has the power of all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from varuna_core.agent.gpu.accelerator import GpuSample, make_lost_findings
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, make_fault
from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value
from varuna_core.plugins import API

NODES = "class/kfd/kfd/topology/nodes"
PROCESSES = "class/kfd/kfd/proc"
DRIVER = "bus/pci/drivers/amdgpu"
"""Folder in /sys with a subfolder for each PCI device that the driver controls, named by the
device's address."""
FILES = (
    f"{NODES}/*/gpu_id",
    f"{NODES}/*/properties",
    f"{DRIVER}/*:*/vendor",
    f"{DRIVER}/*:*/gpu_busy_percent",
    f"{DRIVER}/*:*/mem_info_vram_total",
    f"{DRIVER}/*:*/mem_info_vram_used",
    f"{DRIVER}/*:*/product_name",
    f"{DRIVER}/*:*/ras/umc_err_count",
    f"{DRIVER}/*:*/hwmon/hwmon*/temp[123]_label",
    f"{DRIVER}/*:*/hwmon/hwmon*/temp[123]_input",
    f"{DRIVER}/*:*/hwmon/hwmon*/power1_average",
    f"{DRIVER}/*:*/hwmon/hwmon*/power1_input",
)
CLOSED = "closed"
"""Text that stands for the content of a file that could not be read."""
SENSORS = ("edge", "junction")
"""Temperature sensors in order of preference: Instinct cards from MI200 on have no `edge`."""
TROUBLES = {
    "uncorrectable hardware error": "uncorrectable error",
    "device lost from bus": "lost from the bus",
    "GPU reset begin": "reset",
    "GPU recovery disabled": "no recovery",
    "timeout": "timeout",
}
"""Phrases in the driver's lines, the gravest first, each with the word that vjob uses for it."""
_KERNEL = re.compile(
    r"amdgpu ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d): .{0,80}?"
    r"(uncorrectable hardware error(?!s detected in total)|device lost from bus|GPU reset begin"
    r"|GPU recovery disabled|(?<=ring )\S+ timeout)"
)
_HEADER = re.compile(r"==> (?:/sys/)?(.+) <==")
_TAIL_PROBLEM = re.compile(
    r"tail: (?:cannot open|error reading) .{0,9}?sys/([^'\"\u2019]{1,500})['\"\u2019]"
)


@dataclass(frozen=True)
class Device:
    """A GPU as the compute driver lists it."""

    index: int
    gpu_id: str
    address: str
    """The PCI address of the GPU, such as 0000:c1:00.0."""
    architecture: str
    """Name of the GPU's architecture, such as gfx942; empty if the driver gives none."""


class AmdAccelerator:
    """The AMD GPUs of this node."""

    API = API
    name = "amd"
    visible_variable = "ROCR_VISIBLE_DEVICES"
    """Variable that Slurm sets for the GPUs of a job. If the user also sets HIP_VISIBLE_DEVICES,
    that variable numbers the devices that this one leaves."""
    smi_command = "test -d /sys/class/kfd/kfd && tail -v -n +1 " + " ".join(
        f"/sys/{pattern}" for pattern in FILES
    )

    def __init__(self, root: Path = Path("/sys"), device: Path = Path("/dev/kfd")) -> None:
        self._root, self._device = root, device
        self._ids: Tuple[str, ...] = ()
        self._findings: Tuple[Finding, ...] = ()

    def is_here(self) -> bool:
        return bool(list_devices(read_files(self._root, FILES[:2])))

    def count(self) -> Known[int]:
        devices = list_devices(read_files(self._root, FILES[:2]))
        if not devices:
            return NotKnown(f"/sys/{NODES} lists no GPU")
        if self._device.exists() and not os.access(self._device, os.R_OK | os.W_OK):
            return NotKnown(
                f"you may not open {self._device}: ask an admin to add you to its group, "
                f"{_find_group(self._device)}"
            )
        return Value(len(devices), (Evidence(f"/sys/{NODES}", Sure.MEASURED),))

    def list_models(self) -> Sequence[str]:
        found = parse_files(read_files(self._root, FILES))
        return [one.name for one in found.value] if isinstance(found, Value) else []

    def sample(self) -> Known[Sequence[GpuSample]]:
        found = parse_files(read_files(self._root, FILES))
        if isinstance(found, Value):
            self._ids = tuple(one.uuid for one in found.value)
        self._findings = make_lost_findings(found)
        return found

    def processes(self) -> Known[Mapping[str, Sequence[int]]]:
        folder = self._root / PROCESSES
        if not folder.is_dir():
            return NotKnown(f"/sys/{PROCESSES} does not exist")
        held: Dict[str, List[int]] = {gpu_id: [] for gpu_id in self._ids}
        texts = read_files(self._root, (f"{PROCESSES}/*/vram_*",))
        for path, text in texts.items():
            pid, gpu_id = path.split("/")[-2], path.rpartition("_")[2]
            if pid.isdecimal() and gpu_id in held and _parse_count(text):
                held[gpu_id].append(int(pid))
        return Value(held, (Evidence(f"/sys/{PROCESSES}", Sure.MEASURED),))

    def health(self) -> Sequence[Finding]:
        return self._findings

    def parse_kernel_line(self, text: str) -> Optional[Finding]:
        match = _KERNEL.search(text)
        if match is None:
            return None
        detail = next(word for phrase, word in TROUBLES.items() if phrase in match.group(2))
        source = "kernel log"
        return make_fault(Fault.KERNEL, match.group(1), detail=detail, text=text, source=source)

    def parse_smi(self, text: str) -> Known[Sequence[GpuSample]]:
        return parse_files(split_tail(text))


def read_files(root: Path, patterns: Sequence[str]) -> Dict[str, str]:
    """Return the texts of the files that match the patterns in FILES, by their paths below
    `root`."""
    texts = {}
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            try:
                text = path.read_text(encoding="utf-8", errors="replace").strip()
            except OSError:
                text = CLOSED
            texts[str(path.relative_to(root))] = text
    return texts


def split_tail(text: str) -> Dict[str, str]:
    """Return the texts of the files that `tail -v` printed, by their paths below /sys."""
    texts: Dict[str, List[str]] = {}
    lines: List[str] = []
    for line in text.splitlines():
        header, problem = _HEADER.fullmatch(line.strip()), _TAIL_PROBLEM.match(line)
        if problem:
            texts[problem.group(1)] = [CLOSED]
        elif header:
            lines = texts.setdefault(header.group(1), [])
        else:
            lines.append(line)
    return {path: "\n".join(lines).strip() for path, lines in texts.items()}


def list_devices(texts: Mapping[str, str]) -> List[Device]:
    """List the GPUs that this process may use."""
    found: List[Device] = []
    numbers = {path.split("/")[-2] for path in texts if path.startswith(NODES)}
    for number in sorted((one for one in numbers if re.fullmatch(r"\d{1,6}", one)), key=int):
        gpu_id = texts.get(f"{NODES}/{number}/gpu_id", "")
        if gpu_id in ("", "0", CLOSED):  # processors, and GPUs of other jobs
            continue
        properties = texts.get(f"{NODES}/{number}/properties", "")
        words = dict(re.findall(r"^(\w+) (\d+)$", properties, re.MULTILINE))
        architecture = _spell_architecture(_parse_count(words.get("gfx_target_version", "")) or 0)
        found.append(Device(len(found), gpu_id, _spell_address(words), architecture))
    return found


def parse_files(texts: Mapping[str, str]) -> Known[Sequence[GpuSample]]:
    """Return one sample of all GPUs from the texts of the driver's files."""
    devices = list_devices(texts)
    if not devices:
        return NotKnown(f"/sys/{NODES} lists no GPU that this job may use")
    by_address: Dict[str, Dict[str, str]] = {}
    for path, text in texts.items():
        if path.startswith(DRIVER):
            address, _, rest = path[len(DRIVER) + 1 :].partition("/")
            by_address.setdefault(address, {})[rest] = text
    addresses = [device.address for device in devices]
    found = []
    for place, device in enumerate(devices):
        gauges = by_address.get(device.address, {})
        if all(text == CLOSED for text in gauges.values()):  # or there are none at all
            continue
        is_part = addresses.count(device.address) > 1
        is_first = device.address not in addresses[:place]
        found.append(_make_sample(device, gauges, is_part=is_part, is_first=is_first))
    evidence = Evidence(f"/sys/{DRIVER}", Sure.MEASURED, seen=len(found), expected=len(devices))
    if not found:
        return NotKnown(f"no file of /sys/{DRIVER} can be read", (evidence,))
    return Value(tuple(found), (evidence,))


def _make_sample(
    device: Device, gauges: Mapping[str, str], *, is_part: bool, is_first: bool
) -> GpuSample:
    monitor = {path.rpartition("/")[2]: text for path, text in gauges.items() if "hwmon" in path}
    total, used = (
        None if is_part else _parse_count(gauges.get(f"mem_info_vram_{word}", ""))
        for word in ("total", "used")
    )
    power = _parse_count(monitor.get("power1_average", "")) or _parse_count(
        monitor.get("power1_input", "")
    )
    errors = re.search(r"^ue: *(\d{1,15})$", gauges.get("ras/umc_err_count", ""), re.MULTILINE)
    name = gauges.get("product_name", "")
    return GpuSample(
        index=device.index,
        name=name if name not in ("", CLOSED) else f"AMD {device.architecture}".strip(),
        temperature=_find_temperature(monitor),
        utilization=None if is_part else _parse_count(gauges.get("gpu_busy_percent", "")),
        memory_used_mb=None if used is None else used // 2**20,
        memory_total_mb=None if total is None else total // 2**20,
        power_w=None if power is None or not is_first else power / 1e6,
        ecc_errors=int(errors.group(1)) if errors else None,
        uuid=device.gpu_id,
        address=device.address,
    )


def _find_temperature(monitor: Mapping[str, str]) -> Optional[float]:
    labels = {text: name for name, text in monitor.items() if name.endswith("_label")}
    for sensor in SENSORS:
        name = labels.get(sensor, "").replace("_label", "_input")
        degrees = _parse_count(monitor.get(name, ""))
        if degrees is not None:
            return degrees / 1000
    return None


def _find_group(path: Path) -> str:
    try:
        return path.group()
    except (KeyError, OSError):
        return "a group without a name"


def _spell_address(words: Mapping[str, str]) -> str:
    """Return the PCI address of a GPU, with function 0, since the partitions of one GPU differ only
    in the function."""
    place = _parse_count(words.get("location_id", "")) or 0
    domain = _parse_count(words.get("domain", "")) or 0
    return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.0"


def _spell_architecture(version: int) -> str:
    """Format a version number of the driver as the name of an architecture: 90402 as gfx942, and
    90010 as gfx90a."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}" if version else ""


def _parse_count(text: str) -> Optional[int]:
    return int(text) if re.fullmatch(r"\d{1,19}", text) else None

"""Accelerators of a node: how many there are, what they do, and which fail.

    nvidia.py    NVIDIA's, by pynvml or nvidia-smi
    amd.py       AMD's, by the files of the amdgpu driver
    intel.py     Intel's for data centers, by xpu-smi
    NoAccelerator, below, on a node without known devices

A vendor of accelerators is a class with the attributes of `Accelerator`; other distributions add
theirs by the entry points `vjob.accelerators`. A node uses the first vendor whose devices it has.

Whatever cannot be read is `NotKnown` with the reason, or None in a `GpuSample`; it is never 0. A
reading that lacks some of the devices is a `Value` whose evidence has `seen` below `expected`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from varuna_core.agent.gpu.names import CUDA_VISIBLE
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, make_fault
from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value
from varuna_core.plugins import API, BuiltIn, Seam

CLOSE_LOOK = 6
"""Every so many samples, values that rarely change are read too, such as the state of links and of
rows of memory."""


@dataclass(frozen=True)
class GpuSample:
    """Values of one device at one moment; a value that the driver does not report is None."""

    index: int
    """The driver's number of the device."""
    name: str = ""
    temperature: Optional[float] = None
    utilization: Optional[float] = None
    """Utilization in per cent."""
    memory_used_mb: Optional[float] = None
    memory_total_mb: Optional[float] = None
    power_w: Optional[float] = None
    ecc_errors: Optional[int] = None
    """Uncorrected ECC errors since the driver was loaded."""
    throttle: str = ""
    """Why the device's clock is held down, such as `hw_thermal`; empty if no reason is known."""
    uuid: str = ""
    """The device's uuid, by which `Accelerator.processes` is keyed."""
    address: str = ""
    """The PCI address, such as 0000:c1:00.0, by which the kernel's messages name the device."""
    slice: Optional[int] = None
    """The driver's number of the slice, if the device is one of the slices of a GPU (MIG); None for
    a whole GPU."""

    @property
    def key(self) -> str:
        """The number of the GPU, such as `3`, or `3:1` for a slice of a GPU."""
        return str(self.index) if self.slice is None else f"{self.index}:{self.slice}"

    def as_json(self, processes: Optional[Sequence[int]]) -> Dict[str, Any]:
        """Return the fields of the device in a line of `<node>.gpu.jsonl`."""
        return {
            "index": self.index if self.slice is None else self.key,
            "name": self.name,
            "temperature": self.temperature,
            "utilization": self.utilization,
            "memory_used_mb": self.memory_used_mb,
            "memory_total_mb": self.memory_total_mb,
            "power_w": self.power_w,
            "processes": None if processes is None else list(processes),
            "ecc_errors": self.ecc_errors,
            "throttle": self.throttle,
        }


class Accelerator(Protocol):
    """One vendor's accelerators on this node."""

    API: int
    name: str
    visible_variable: str
    """The environment variable that names the devices which a process may use, such as
    CUDA_VISIBLE_DEVICES."""
    smi_command: str
    """A shell command that prints one reading of the devices; empty if there is no such command.
    `vjob status` runs it on the nodes of a job that has no agent."""

    def is_here(self) -> bool:
        """Return True if this node has such devices, or the vendor's tools."""
        ...

    def count(self) -> Known[int]:
        """Count the devices that this process may see; the source says how they were counted."""
        ...

    def list_models(self) -> Sequence[str]:
        """Return the names of the devices; none if the driver cannot be asked quickly."""
        ...

    def sample(self) -> Known[Sequence[GpuSample]]:
        """Return one sample of each device."""
        ...

    def processes(self) -> Known[Mapping[str, Sequence[int]]]:
        """Return the processes on each device of the last sample, keyed by the device's uuid."""
        ...

    def health(self) -> Sequence[Finding]:
        """Return the faults in the last sample, as findings of `facts.hardware.make_fault`."""
        ...

    def parse_kernel_line(self, text: str) -> Optional[Finding]:
        """Return the fault that a line of the kernel's log reports; its part is a PCI address."""
        ...

    def parse_smi(self, text: str) -> Known[Sequence[GpuSample]]:
        """Parse the output of `smi_command` into samples of all devices."""
        ...


class NoAccelerator:
    """The accelerator of a node on which no vendor's devices were found."""

    API = API
    name = "none"
    visible_variable = CUDA_VISIBLE
    """The variable of the vendor for which torch is most often built; it does no harm on a node
    without devices."""
    smi_command = ""

    def __init__(self, tried: Sequence[str] = ()) -> None:
        names = " or ".join(filter(None, (", ".join(tried[:-1]), *tried[-1:])))
        self._evidence = (Evidence(f"this node has no device of {names}"),)

    def is_here(self) -> bool:
        return True

    def count(self) -> Known[int]:
        return Value(0, self._evidence)

    def list_models(self) -> Sequence[str]:
        return ()

    def sample(self) -> Known[Sequence[GpuSample]]:
        return NotKnown(self._evidence[0].source, self._evidence)

    def processes(self) -> Known[Mapping[str, Sequence[int]]]:
        return NotKnown(self._evidence[0].source, self._evidence)

    def health(self) -> Sequence[Finding]:
        return ()

    def parse_kernel_line(self, text: str) -> Optional[Finding]:
        return None

    def parse_smi(self, text: str) -> Known[Sequence[GpuSample]]:
        return NotKnown(self._evidence[0].source, self._evidence)


GROUP = "vjob.accelerators"
ACCELERATORS = Seam(
    GROUP,
    [
        BuiltIn(
            "nvidia",
            "GPUs of NVIDIA, read with pynvml or nvidia-smi.",
            "varuna_core.agent.gpu.nvidia:NvidiaAccelerator",
        ),
        BuiltIn(
            "amd",
            "GPUs of AMD, read from the files of the amdgpu driver.",
            "varuna_core.agent.gpu.amd:AmdAccelerator",
        ),
        BuiltIn(
            "intel",
            "Data center GPUs of Intel, read with xpu-smi.",
            "varuna_core.agent.gpu.intel:IntelAccelerator",
        ),
    ],
)


def find_lost(reading: Known[Sequence[GpuSample]]) -> Tuple[int, ...]:
    """Return the numbers of devices that the driver lists but for which `reading` has no values."""
    if isinstance(reading, NotKnown):
        return ()
    expected = reading.evidence[0].expected or 0
    return tuple(sorted(set(range(expected)) - {one.index for one in reading.value}))


def make_lost_findings(reading: Known[Sequence[GpuSample]]) -> Tuple[Finding, ...]:
    """Return a fault `Fault.LOST` for each device that the driver lists but for which `reading` has
    no values."""
    text = reading.evidence[0].text if reading.evidence else ""
    source = reading.evidence[0].source if reading.evidence else ""
    return tuple(
        make_fault(Fault.LOST, index, text=text, source=source) for index in find_lost(reading)
    )


def list_named(name: str, samples: Sequence[GpuSample]) -> List[GpuSample]:
    """Return the devices that a name in a variable of visible devices means.

    A name is the number of a GPU, which also stands for the GPU's slices, or a uuid, or the
    beginning of a uuid.
    """
    if name.isdecimal():
        return [one for one in samples if one.index == int(name)]
    return [one for one in samples if one.key == name or (one.uuid and one.uuid.startswith(name))]


def parse_number(word: str) -> Optional[float]:
    """Parse a number that a tool printed; None for `N/A` and other text."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def describe_silence(code: Optional[int], limit_s: float) -> str:
    """Describe how a tool that printed nothing ended; `code` is None if it was still running."""
    return f"no answer in {limit_s:.0f} s" if code is None else f"no answer, exit code {code}"


def read_gpus(accelerator: Accelerator) -> Any:
    """Return one sample of all GPUs as JSON, or an object whose `problem` says why the GPUs could
    not be read."""
    found = accelerator.sample()
    if isinstance(found, NotKnown):
        return {"problem": found.reason}
    return [one.as_json(None) for one in found.value]


def list_accelerators() -> List[Accelerator]:
    """Return one object for each known vendor, built-in vendors first."""
    classes = (ACCELERATORS.load(name) for name in ACCELERATORS.list_names())
    return [one() for one in classes if one is not None]


def choose_accelerator() -> Accelerator:
    """Return the accelerator of the first vendor whose devices are on this node."""
    known = list_accelerators()
    here = next((one for one in known if one.is_here()), None)
    return here or NoAccelerator([one.name for one in known])


def list_variables() -> List[str]:
    """List the environment variables of all vendors that limit a process to some devices."""
    return list(dict.fromkeys(one.visible_variable for one in list_accelerators()))


def count_visible(accelerator: Accelerator, environ: Mapping[str, str]) -> Known[int]:
    """Count the devices that a process with this environment may use."""
    visible = environ.get(accelerator.visible_variable)
    if visible is None:
        return accelerator.count()
    source = f"{accelerator.visible_variable}={visible}"
    return Value(len(split_devices(visible)), (Evidence(source, Sure.MEASURED),))


def find_visible(environ: Mapping[str, str]) -> Optional[Tuple[str, str]]:
    """Find the first vendor's variable of visible devices that leaves the process any devices;
    return its name and value."""
    for name in list_variables():
        if split_devices(environ.get(name, "")):
            return name, environ[name]
    return None


def split_devices(visible: str) -> List[str]:
    """Split a variable of visible devices; CUDA ignores the list from the first invalid item on."""
    found = []
    for word in visible.split(","):
        if not word.strip() or word.strip() in ("-1", "NoDevFiles"):
            break
        found.append(word.strip())
    return found

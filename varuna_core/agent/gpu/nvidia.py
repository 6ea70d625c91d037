"""NVIDIA's GPUs, by pynvml where the node's Python has it, else by nvidia-smi.

A GPU that fell off the bus takes none of the others with it: nvidia-smi exits with 15 and prints
the rows of the survivors, and pynvml fails for that device alone.
"""

from __future__ import annotations

import importlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from varuna_core.agent.gpu import nvidia_health as health
from varuna_core.agent.gpu.accelerator import (
    CLOSE_LOOK,
    GpuSample,
    describe_silence,
    make_lost_findings,
    parse_number,
)
from varuna_core.agent.gpu.names import CUDA_VISIBLE, NVIDIA_SMI
from varuna_core.agent.processes.process import CommandResult, run
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, make_fault
from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value
from varuna_core.plugins import API

SAMPLE_S, COUNT_S = 10.0, 20.0
QUERY = "index,name,temperature.gpu,utilization.gpu,memory.used,memory.total,power.draw"
MORE = (
    "uuid,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.active",
    "uuid,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active",
    "",
)
"""Additional fields to query, for several versions of nvidia-smi, the newest first: one field that
a version does not know makes the whole query fail."""
UNKNOWN_FIELD = "not a valid field"
FORMAT = "--format=csv,noheader,nounits"
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder with a subfolder for each GPU of the machine."""
KEYS = ("temperature", "utilization", "memory_used_mb", "memory_total_mb", "power_w")
_LOST = re.compile(r"unable to determine the device handle|gpu is lost", re.IGNORECASE)
"""Pattern of a line about one GPU that the driver cannot reach."""

_LOST_ADDRESS = re.compile(
    r"device handle for GPU(?:\d{1,3}:)? ?([0-9a-f]{4,8}:[0-9a-f:.]+[0-9a-f])", re.IGNORECASE
)

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
"""The driver's bits for the reasons why a clock is held down. Bit 1, which is left out, means that
the GPU is idle."""
NVML_REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)
UNCORRECTED, VOLATILE = 1, 0
"""NVML's numbers for uncorrected errors, and for counts since the driver was loaded."""


class NvidiaAccelerator:
    """The NVIDIA GPUs of this node."""

    API = API
    name = "nvidia"
    visible_variable = CUDA_VISIBLE
    smi_command = f"{NVIDIA_SMI} --query-gpu={QUERY} {FORMAT}"

    def __init__(self) -> None:
        self._more = list(MORE)
        self._nvml: Any = None
        self._is_open = False
        self._num_expected = 0
        self._uuids: Dict[int, str] = {}
        """The uuids of all GPUs that were ever read, by the GPU's number."""
        self._findings: Tuple[Finding, ...] = ()
        self._num_samples = 0
        self._first: Dict[str, health.GpuState] = {}
        self._states: Dict[str, health.GpuState] = {}
        """State of each GPU by uuid, as last read; `_first` has the state as first read."""
        self._events: Any = None
        """NVML's set of events, from which Xid errors are taken; None if there is none."""
        self._xids: Dict[Tuple[int, int], int] = {}
        """Number of times that each Xid error was reported, by GPU and number of the error."""

    def is_here(self) -> bool:
        return bool(shutil.which(NVIDIA_SMI) or _list_device_files() or Path("/dev/dxg").exists())

    def count(self) -> Known[int]:
        program = shutil.which(NVIDIA_SMI)
        if program is None:
            source = f"/dev/nvidia*; no {NVIDIA_SMI} in PATH"
            return Value(len(_list_device_files()), (Evidence(source, Sure.MEASURED),))
        source = f"{NVIDIA_SMI} -L"
        result = run([program, "-L"], timeout_s=COUNT_S)
        count = len(re.findall(r"^GPU \d+:", result.out, re.MULTILINE))
        said = f"{result.out}\n{result.err}".strip()
        if result.code != 0 and not count:
            why = said.splitlines()[-1] if said else describe_silence(result.code, COUNT_S)
            return NotKnown(f"{source} failed: {why}", (Evidence(source, text=said[:400]),))
        lost = len(_LOST.findall(said))
        evidence = Evidence(source, Sure.REPORTED, seen=count, expected=count + lost)
        return Value(count, (evidence,))

    def list_models(self) -> Sequence[str]:
        return read_models(DRIVER)

    def sample(self) -> Known[Sequence[GpuSample]]:
        if not self._is_open:
            self._nvml, self._nvml_problem = _open_nvml()
            self._is_open = True
        found = self._read_nvml() if self._nvml is not None else self._read_smi()
        lost = make_lost_findings(found)
        if isinstance(found, Value):
            self._look_closely(found.value)
            addressed = tuple(
                replace(one, address=self._states[one.uuid].address)
                if one.uuid in self._states
                else one
                for one in found.value
            )
            parts = health.cut_into_slices(addressed, self._states)
            self._uuids.update((one.index, one.uuid) for one in addressed)
            source = found.evidence[0].source
            faults = health.list_faults(addressed, self._first, self._states, source)
            self._findings = (*lost, *faults, *self._take_events())
            return Value(parts, found.evidence)
        text = "; ".join(one.text for one in found.evidence)
        self._findings = tuple(
            make_fault(Fault.LOST, index, text=text, source=NVIDIA_SMI)
            for index in sorted(self._find_named(text))
        )
        return found

    def _find_named(self, text: str) -> Set[int]:
        """Return the numbers of the GPUs whose addresses the tool names as unreachable."""
        addresses = {health.spell_address(word) for word in _LOST_ADDRESS.findall(text)}
        return {
            index
            for index, uuid in self._uuids.items()
            if uuid in self._states and self._states[uuid].address in addresses
        }

    def _look_closely(self, samples: Sequence[GpuSample]) -> None:
        """Read the rarely changing state of the GPUs: at one of CLOSE_LOOK samples, and at every
        sample if a GPU is cut into slices."""
        is_due = self._num_samples % CLOSE_LOOK == 0
        self._num_samples += 1
        if not is_due and not any(state.is_cut for state in self._states.values()):
            return
        if self._nvml is not None:
            states = self._read_nvml_states(samples)
        else:
            states = self._read_smi_states(is_due)
        self._states = {**self._states, **states}
        self._first = {**states, **self._first}

    def _read_smi_states(self, is_due: bool) -> Dict[str, health.GpuState]:
        states = health.parse_xml(_ask_smi("-q", "-x"))
        if any(state.slices for state in states.values()):
            states = health.name_slices(states, _ask_smi("-L"))
        if is_due:
            return health.add_links(states, _ask_smi("nvlink", "-s"), _ask_smi("nvlink", "-e"))
        kept = self._states
        return {
            uuid: replace(state, links=kept[uuid].links, link_errors=kept[uuid].link_errors)
            if uuid in kept
            else state
            for uuid, state in states.items()
        }

    def _read_nvml_states(self, samples: Sequence[GpuSample]) -> Dict[str, health.GpuState]:
        nvml, found = self._nvml, {}
        for one in samples:
            try:
                device = nvml.nvmlDeviceGetHandleByIndex(one.index)
                found[one.uuid] = health.read_state(nvml, device, _make_ask(nvml, device))
            except nvml.NVMLError:  # lost since the sample: the next one says so
                continue
        return found

    def _take_events(self) -> List[Finding]:
        """Return faults that NVML has reported since the first sample."""
        nvml = self._nvml
        if nvml is None:
            return []
        try:
            if self._events is None:
                self._events = nvml.nvmlEventSetCreate()
                for index in self._uuids:
                    device = nvml.nvmlDeviceGetHandleByIndex(index)
                    nvml.nvmlDeviceRegisterEvents(device, health.XID_EVENT, self._events)
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                key = (nvml.nvmlDeviceGetIndex(event.device), int(event.eventData))
                self._xids[key] = self._xids.get(key, 0) + 1
        except (nvml.NVMLError, AttributeError):  # none waits, or none can be had
            pass
        return [
            make_fault(Fault.XID, index, code=code, count=count, source="pynvml")
            for (index, code), count in self._xids.items()
        ]

    def processes(self) -> Known[Mapping[str, Sequence[int]]]:
        found = self._read_processes()
        if isinstance(found, NotKnown):
            return found
        parts = {one.uuid: one.pids for state in self._states.values() for one in state.slices}
        return Value({**found.value, **parts}, found.evidence)

    def _read_processes(self) -> Known[Mapping[str, Sequence[int]]]:
        if self._nvml is not None:
            return self._read_nvml_processes()
        program = shutil.which(NVIDIA_SMI)
        if program is None or not self._more[0]:
            return NotKnown(f"this {NVIDIA_SMI} reports no uuids")
        words = [program, "--query-compute-apps=gpu_uuid,pid", FORMAT]
        result = run(words, timeout_s=SAMPLE_S)
        if result.code != 0:
            return NotKnown(f"{NVIDIA_SMI}: {_describe(result.code, result.err + result.out)}")
        found: Dict[str, List[int]] = {uuid: [] for uuid in self._uuids.values()}
        found.update(parse_processes(result.out))
        return Value(found, (Evidence(NVIDIA_SMI),))

    def health(self) -> Sequence[Finding]:
        return self._findings

    def parse_kernel_line(self, text: str) -> Optional[Finding]:
        return health.parse_kernel_line(text)

    def parse_smi(self, text: str) -> Known[Sequence[GpuSample]]:
        return parse_rows(text, is_long=False)

    def _read_smi(self) -> Known[Sequence[GpuSample]]:
        program = shutil.which(NVIDIA_SMI)
        if program is None:
            return NotKnown(f"{self._nvml_problem}; {NVIDIA_SMI} is not in PATH")
        result = self._query([program])
        said = (result.err + result.out).strip()
        found = self._parse(result)
        others = sorted(set(self._uuids) - self._find_named(said))
        if isinstance(found, NotKnown) and 0 < len(others) < len(self._uuids):
            # With one GPU gone, many versions print that and nothing of the others.
            again = self._query([program, "--id=" + ",".join(map(str, others))])
            rest = self._parse(again, said)
            found = rest if isinstance(rest, Value) else found
        if result.code == 0 or (isinstance(found, Value) and found.value):
            if isinstance(found, Value):
                self._num_expected = found.evidence[0].expected or 0
            return found
        return NotKnown(
            f"{NVIDIA_SMI}: {_describe(result.code, said)}",
            (Evidence(NVIDIA_SMI, text=said[:400]),),
        )

    def _query(self, words: Sequence[str]) -> CommandResult:
        while True:
            fields = ",".join(filter(None, (QUERY, self._more[0])))
            result = run([*words, f"--query-gpu={fields}", FORMAT], timeout_s=SAMPLE_S)
            said = result.err + result.out
            if result.code == 0 or UNKNOWN_FIELD not in said or len(self._more) == 1:
                return result
            del self._more[0]

    def _parse(self, result: CommandResult, said: str = "") -> Known[Sequence[GpuSample]]:
        return parse_rows(
            "\n".join((result.out, result.err, said)),
            is_long=bool(self._more[0]),
            known=self._num_expected,
        )

    def _read_nvml(self) -> Known[Sequence[GpuSample]]:
        nvml, found, problems = self._nvml, [], []
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            return NotKnown(f"pynvml: {error}")
        for index in range(count):
            try:
                found.append(_read_device(nvml, index))
            except nvml.NVMLError as error:
                problems.append(f"GPU {index}: {error}")
        if problems and not found:
            return NotKnown(f"pynvml: {'; '.join(problems)}")
        self._num_expected = max(count, self._num_expected)
        text = "; ".join(problems)
        evidence = Evidence(
            "pynvml", Sure.REPORTED, text=text, seen=len(found), expected=self._num_expected
        )
        return Value(tuple(found), (evidence,))

    def _read_nvml_processes(self) -> Known[Mapping[str, Sequence[int]]]:
        nvml, found = self._nvml, {}
        for index, uuid in self._uuids.items():
            try:
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                held = nvml.nvmlDeviceGetComputeRunningProcesses(device)
            except (nvml.NVMLError, AttributeError):
                continue
            found[uuid] = [process.pid for process in held]
        return Value(found, (Evidence("pynvml", seen=len(found), expected=len(self._uuids)),))


def parse_rows(text: str, *, is_long: bool, known: int = 0) -> Known[Sequence[GpuSample]]:
    """Parse the rows of a query, with their coverage; `[N/A]` becomes None.

    `known` GPUs have been seen before. A long query has the fields of MORE too.
    """
    found, rest = [], []
    for line in text.splitlines():
        row = _parse_row(line, is_long)
        if row is None:
            rest.append(line.strip())
        else:
            found.append(row)
    said = [line for line in rest if line]
    num_lost = sum(1 for line in said if _LOST.search(line))
    highest = max((one.index for one in found), default=-1)
    expected = max(known, highest + 1, len(found) + num_lost)
    evidence = Evidence(NVIDIA_SMI, text="; ".join(said)[:400], seen=len(found), expected=expected)
    if not found and (
        said or known
    ):  # one that is lost is named; a tool that was ended says nothing
        return NotKnown(f"{NVIDIA_SMI}: {said[0] if said else 'it printed nothing'}", (evidence,))
    return Value(tuple(found), (evidence,))


def parse_processes(text: str) -> Dict[str, List[int]]:
    """Parse `nvidia-smi --query-compute-apps=gpu_uuid,pid`; return pids by the GPU's uuid."""
    found: Dict[str, List[int]] = {}
    for line in text.splitlines():
        uuid, _, pid = (word.strip() for word in line.partition(","))
        if pid.isdecimal():
            found.setdefault(uuid, []).append(int(pid))
    return found


def spell_throttle(bits: int) -> str:
    """Name why a GPU's clock is lowered; empty if it is not, or only because the GPU is idle."""
    words = [word for bit, word in THROTTLES.items() if bits & bit]
    unknown = bits & ~sum(THROTTLES) & ~1
    return ", ".join([*words, *([hex(unknown)] if unknown else [])])


def _parse_row(line: str, is_long: bool) -> Optional[GpuSample]:
    words = [word.strip() for word in line.split(",")]
    num_more = 3 if is_long and len(words) >= 2 + len(KEYS) + 3 else 0
    num_name = len(words) - 1 - len(KEYS) - num_more  # a name may hold commas
    if num_name < 1 or not words[0].isdecimal():
        return None
    rest = words[1 + num_name :]
    numbers: Dict[str, Any] = {key: parse_number(word) for key, word in zip(KEYS, rest)}  # noqa: B905
    uuid, errors, reasons = rest[len(KEYS) :] or ("", "", "")
    return GpuSample(
        index=int(words[0]),
        name=", ".join(words[1 : 1 + num_name]),
        **numbers,
        ecc_errors=int(errors) if errors.isdecimal() else None,
        throttle=spell_throttle(_parse_bits(reasons)),
        uuid=uuid,
    )


def _open_nvml() -> Tuple[Any, str]:
    """Return the module pynvml and an empty text, or None and why pynvml cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        nvml.nvmlDeviceGetCount()
        return nvml, ""
    except Exception as error:  # no module, no driver library, or a driver that fails: same to us
        return None, f"pynvml: {error}"


def _make_ask(nvml: Any, device: Any) -> health.Ask:
    def ask(names: Sequence[str], *words: Any) -> Any:
        """Return the result of the first of these functions that this version of pynvml and this
        driver have; None if they have none."""
        for name in names:
            try:
                return getattr(nvml, name)(device, *words)
            except AttributeError:
                continue
            except nvml.NVMLError as error:  # not every device has every gauge
                if _LOST.search(str(error)):
                    raise
        return None

    return ask


def _ask_smi(*words: str) -> str:
    """Run `nvidia-smi` with these arguments and return its output; empty if it fails."""
    program = shutil.which(NVIDIA_SMI)
    result = None if program is None else run([program, *words], timeout_s=SAMPLE_S)
    return result.out if result is not None and result.code == 0 else ""


def _read_device(nvml: Any, index: int) -> GpuSample:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(device)

    ask = _make_ask(nvml, device)
    memory = ask(["nvmlDeviceGetMemoryInfo"])  # not where it shares the processor's
    load = ask(["nvmlDeviceGetUtilizationRates"])
    power = ask(["nvmlDeviceGetPowerUsage"])
    uuid = ask(["nvmlDeviceGetUUID"])
    return GpuSample(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        temperature=ask(["nvmlDeviceGetTemperature"], 0),
        utilization=None if load is None else load.gpu,
        memory_used_mb=None if memory is None else memory.used // 2**20,
        memory_total_mb=None if memory is None else memory.total // 2**20,
        power_w=None if power is None else power / 1000,
        ecc_errors=ask(["nvmlDeviceGetTotalEccErrors"], UNCORRECTED, VOLATILE),
        throttle=spell_throttle(ask(NVML_REASONS) or 0),
        uuid=uuid.decode() if isinstance(uuid, bytes) else uuid or str(index),
    )


def read_models(driver: Path) -> List[str]:
    """Read the model name of each GPU from the driver's files, if there are any."""
    found = []
    for path in sorted(driver.glob("*/information")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        rows = (row.partition(":") for row in text.splitlines())
        found += [model.strip() for key, _, model in rows if key == "Model" and model.strip()]
    return found


def _list_device_files() -> List[Path]:
    found = Path("/dev").glob("nvidia*")
    return [path for path in found if re.fullmatch(r"nvidia\d+", path.name)]


def _describe(code: Optional[int], said: str) -> str:
    """Return the tool's own error message or, without one, describe how the tool ended."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return lines[0].strip() if lines else describe_silence(code, SAMPLE_S)


def _parse_bits(word: str) -> int:
    try:
        return int(word, 16)
    except ValueError:
        return 0

"""The rarely changing state of NVIDIA's GPUs: rows of memory, links, slices (MIG), a requested
reset; and the driver's lines in the kernel's log.

The state is read by `nvidia-smi -q -x` and `nvidia-smi nvlink`, or by NVML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple
from xml.etree import ElementTree

from varuna_core.agent.gpu.accelerator import GpuSample, parse_number
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, make_fault

MOST_LINKS = 18
XID_EVENT = 8
"""NVML's number for events that have an Xid."""
REPLAY, RECOVERY = 0, 1
"""NVML's numbers for two errors of a link: data was sent again (replay), or the link was started
again (recovery)."""
ACTIONS = {1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}
"""Actions on a GPU that the driver may request, by NVML's number; 0 means none."""
RECOVERY_FIELD = 230
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]{1,24})(?: [^)]{0,64})?\): (\d{1,4})\b")
_FELL = re.compile(
    r"NVRM: (?:The NVIDIA )?GPU ([0-9a-fA-F:.]{3,24}\d)(?::|\\x0a|\n).{0,200}?fallen off the bus",
    re.DOTALL,
)
"""Pattern of the message for a GPU that has fallen off the bus: one line, or three lines, whose
ends the kernel's log may spell `\x0a`."""
_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (\S+)\)", re.MULTILINE)
_SLICE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (\S+)\)")
_LINK = re.compile(r"^\s*Link (\d+): (<inactive>|[\d.]+ GB/s)", re.MULTILINE)
_LINK_ERRORS = re.compile(r"^\s*Link \d+: (?:Replay|Recovery) Errors: (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Slice:
    """A part of a GPU in which a process may run (MIG)."""

    number: int
    instance: Tuple[int, int]
    """Numbers of the slice's GPU instance and of its compute instance."""
    used_mb: Optional[float] = None
    total_mb: Optional[float] = None
    pids: Tuple[int, ...] = ()
    uuid: str = ""
    profile: str = ""
    """Profile of the slice, such as 3g.20gb."""


@dataclass(frozen=True)
class GpuState:
    """The rarely changing state of one GPU; None where the driver does not tell."""

    address: str = ""
    is_cut: bool = False
    """True if the GPU is in MIG mode; there may be no slices yet."""
    slices: Tuple[Slice, ...] = ()
    remap_pending: Optional[bool] = None
    remap_failed: Optional[bool] = None
    action: str = ""
    """The action that the driver requests for the GPU; empty for none."""
    links: Tuple[bool, ...] = ()
    """True for each link that is up; empty where there are none."""
    link_errors: Optional[int] = None


States = Mapping[str, GpuState]
"""State of each GPU, keyed by uuid."""


def parse_xml(text: str) -> Dict[str, GpuState]:
    """Parse the output of `nvidia-smi -q -x`. Return the state of each GPU in it; an empty
    dictionary for any other text."""
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        return {}
    found = {}
    for gpu in root.iter("gpu"):
        action = (gpu.findtext("gpu_recovery_action") or "").strip()
        found[(gpu.findtext("uuid") or "").strip()] = GpuState(
            address=spell_address(gpu.get("id") or ""),
            is_cut=_read(gpu, "mig_mode/current_mig") == "Enabled",
            slices=tuple(_list_slices(gpu)),
            remap_pending=_parse_word(_read(gpu, "remapped_rows/remapped_row_pending")),
            remap_failed=_parse_word(_read(gpu, "remapped_rows/remapped_row_failure")),
            action="" if action in ("None", "N/A") else action[:40],
        )
    found.pop("", None)
    return found


def _list_slices(gpu: ElementTree.Element) -> List[Slice]:
    pids: Dict[Tuple[int, int], List[int]] = {}
    for process in gpu.iter("process_info"):
        place = _read_instance(process)
        pid = _read(process, "pid")
        if place is not None and pid.isdecimal():
            pids.setdefault(place, []).append(int(pid))
    found = []
    for one in gpu.iter("mig_device"):
        place, number = _read_instance(one), _read(one, "index")
        if place is not None and number.isdecimal():
            used, total = (
                parse_number(_read(one, f"fb_memory_usage/{word}").partition(" ")[0])
                for word in ("used", "total")
            )
            found.append(Slice(int(number), place, used, total, tuple(pids.get(place, ()))))
    return found


def _read_instance(element: ElementTree.Element) -> Optional[Tuple[int, int]]:
    words = [_read(element, f"{kind}_instance_id") for kind in ("gpu", "compute")]
    return (int(words[0]), int(words[1])) if all(map(str.isdecimal, words)) else None


def _read(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _parse_word(word: str) -> Optional[bool]:
    return {"Yes": True, "No": False}.get(word)


def name_slices(states: Mapping[str, GpuState], listed: str) -> Dict[str, GpuState]:
    """Return the states of GPUs with the uuid and profile of each MIG slice filled in.

    `listed` is the output of `nvidia-smi -L`.
    """
    named: Dict[Tuple[str, int], Tuple[str, str]] = {}
    gpu = ""
    for line in listed.splitlines():
        if match := _GPU.match(line):
            gpu = match.group(2)
        elif match := _SLICE.match(line):
            named[gpu, int(match.group(2))] = (match.group(3), match.group(1))
    return {
        uuid: replace(
            state,
            slices=tuple(
                replace(one, uuid=named.get((uuid, one.number), ("", ""))[0],
                        profile=named.get((uuid, one.number), ("", ""))[1])
                for one in state.slices
            ),
        )
        for uuid, state in states.items()
    }  # fmt: skip


def add_links(states: Mapping[str, GpuState], status: str, errors: str) -> Dict[str, GpuState]:
    """Return the states of GPUs with their NVLinks filled in.

    `status` and `errors` are the outputs of `nvidia-smi nvlink -s` and `nvidia-smi nvlink -e`.
    """
    links = {
        uuid: tuple(word != "<inactive>" for _, word in _LINK.findall(part))
        for uuid, part in _split_gpus(status).items()
    }
    counts = {
        uuid: sum(map(int, _LINK_ERRORS.findall(part)))
        for uuid, part in _split_gpus(errors).items()
        if _LINK_ERRORS.search(part)
    }
    return {
        uuid: replace(state, links=links.get(uuid, ()), link_errors=counts.get(uuid))
        for uuid, state in states.items()
    }


def _split_gpus(text: str) -> Dict[str, str]:
    """Return the lines that follow each GPU's heading line, keyed by the uuid of the GPU."""
    places = [*_GPU.finditer(text)]
    ends = [*(place.start() for place in places[1:]), len(text)]
    return {
        place.group(2): text[place.end() : end]
        for place, end in zip(places, ends)  # noqa: B905
    }


Ask = Callable[..., Any]


def read_state(nvml: Any, device: Any, ask: Ask) -> GpuState:
    """Return the state of one GPU by NVML; `ask` calls an NVML function that may be missing."""
    pci = ask(["nvmlDeviceGetPciInfo"])
    rows = ask(["nvmlDeviceGetRemappedRows"])
    mode = ask(["nvmlDeviceGetMigMode"])
    links, errors = [], []
    for link in range(MOST_LINKS):
        is_up = ask(["nvmlDeviceGetNvLinkState"], link)
        if is_up is None:
            break
        links.append(bool(is_up))
        counts = (ask(["nvmlDeviceGetNvLinkErrorCounter"], link, one) for one in (REPLAY, RECOVERY))
        errors += [int(count) for count in counts if count is not None]
    return GpuState(
        address=spell_address(_decode(getattr(pci, "busId", ""))),
        is_cut=bool(mode and mode[0]),
        slices=tuple(_list_nvml_slices(nvml, ask)) if mode and mode[0] else (),
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
        action=_read_action(ask),
        links=tuple(links),
        link_errors=sum(errors) if errors else None,
    )


def _read_action(ask: Ask) -> str:
    values = ask(["nvmlDeviceGetFieldValues"], [RECOVERY_FIELD])
    if not values or getattr(values[0], "nvmlReturn", 1) != 0:
        return ""
    return ACTIONS.get(getattr(values[0].value, "uiVal", 0), "")


def _list_nvml_slices(nvml: Any, ask: Ask) -> List[Slice]:
    found = []
    for number in range(ask(["nvmlDeviceGetMaxMigDeviceCount"]) or 0):
        part = ask(["nvmlDeviceGetMigDeviceHandleByIndex"], number)
        if part is None:  # fewer than there may be
            continue
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(part)
            held = nvml.nvmlDeviceGetComputeRunningProcesses(part)
            name = _decode(nvml.nvmlDeviceGetName(part))
            found.append(
                Slice(
                    number=number,
                    instance=(
                        nvml.nvmlDeviceGetGpuInstanceId(part),
                        nvml.nvmlDeviceGetComputeInstanceId(part),
                    ),
                    used_mb=memory.used // 2**20,
                    total_mb=memory.total // 2**20,
                    pids=tuple(one.pid for one in held),
                    uuid=_decode(nvml.nvmlDeviceGetUUID(part)),
                    profile=name.rpartition("MIG ")[2],
                )
            )
        except (nvml.NVMLError, AttributeError):
            continue
    return found


def _decode(text: Any) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)


def cut_into_slices(samples: Sequence[GpuSample], states: States) -> Tuple[GpuSample, ...]:
    """Replace each GPU that is cut into slices by its slices, and return all samples.

    Load and power are known of the whole GPU alone, which other jobs may use too, so they are left
    out.
    """
    found: List[GpuSample] = []
    for one in samples:
        state = states.get(one.uuid, GpuState())
        found += [one] if not state.slices else []
        found += [
            replace(
                one,
                name=f"{one.name} MIG {part.profile}".rstrip(),
                slice=part.number,
                uuid=part.uuid or f"{one.uuid}/{part.instance[0]}/{part.instance[1]}",
                utilization=None,
                power_w=None,
                memory_used_mb=part.used_mb,
                memory_total_mb=part.total_mb,
            )
            for part in state.slices
        ]
    return tuple(found)


def list_faults(
    samples: Sequence[GpuSample], first: States, now: States, source: str
) -> List[Finding]:
    """Return the faults that the states of GPUs show.

    `first` are their states when the attempt began: a counter is a fault if it grew since.
    """
    found = []
    most_links = {uuid: sum(state.links) for uuid, state in now.items()}
    for one in {sample.index: sample for sample in samples}.values():
        state, before = now.get(one.uuid), first.get(one.uuid)
        if state is None or before is None:
            continue

        def add(
            fault: Fault, detail: str, count: Optional[int] = None, index: int = one.index
        ) -> None:
            found.append(make_fault(fault, index, detail=detail, count=count, source=source))

        if state.remap_failed:
            add(Fault.REMAP, "failed")
        elif state.remap_pending:
            add(Fault.REMAP, "pending")
        if state.action:
            add(Fault.RESET, state.action)
        others = {count for key, count in most_links.items() if key != one.uuid}
        num_up, usual = sum(state.links), sum(before.links)
        if len(most_links) > 3 and len(others) == 1:
            usual = max(usual, *others)
        if state.links and num_up < usual:
            add(Fault.NVLINK, f"of {usual}", usual - num_up)
        grown = (state.link_errors or 0) - (before.link_errors or 0)
        if before.link_errors is not None and grown > 0:
            add(Fault.NVLINK_ERRORS, "replays and recoveries", grown)
    return found


def parse_kernel_line(text: str) -> Optional[Finding]:
    """Return the fault that a line of the driver in the kernel's log reports."""
    if match := _XID.search(text):
        address, code = spell_address(match.group(1)), int(match.group(2))
        return make_fault(Fault.XID, address, code=code, text=text, source="kernel log")
    if match := _FELL.search(text):
        return make_fault(Fault.LOST, spell_address(match.group(1)), text=text, source="kernel log")
    return None


def spell_address(text: str) -> str:
    """Spell 00000000:3B:00.0 and 0000:3b:00 as 0000:3b:00.0."""
    match = re.search(r"(?:0000)?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.\d)?$", text.lower())
    return f"{match.group(1)}.0" if match else ""

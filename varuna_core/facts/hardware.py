"""Hardware faults, as drivers and the kernel report them.

A fault is a `Finding` whose rule is a `Fault`. Its values are those of `make_fault`, and those that
the sampler adds: when it began, and the affected rank. `sentences.py` has its
sentence.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from varuna_core.facts.finding import Finding
from varuna_core.facts.known import Evidence
from varuna_core.facts.remedy import Action, Remedy, Target


class Fault(str, Enum):
    """Kind of a hardware fault; its value is the `rule` of the `Finding` about it."""

    LOST = "gpu-lost"
    """The driver knows the GPU but cannot reach it."""
    XID = "gpu-xid"
    """A numbered message of NVIDIA's driver."""
    KERNEL = "gpu-kernel"
    """A message of another vendor's driver."""
    ECC = "gpu-ecc"
    """Uncorrected memory errors of a GPU since the attempt began."""
    REMAP = "gpu-remap"
    """A row of the GPU's memory needs to be remapped, or the remapping failed."""
    RESET = "gpu-reset"
    """The driver says that the GPU needs a reset, or its node a restart."""
    NVLINK = "gpu-nvlink"
    """NVLinks of a GPU to other GPUs are down."""
    NVLINK_ERRORS = "gpu-nvlink-errors"
    PORT_DOWN = "port-down"
    PORT_SLOW = "port-slow"
    """A port whose rate is lower than before, or than the rate of ports of the same model."""
    PORT_ERRORS = "port-errors"
    """Errors or retransmits of a port that increase."""
    HOST_MEMORY = "host-memory"
    """Errors of the node's main memory."""


class Xid(Enum):
    """Kind of a numbered message of NVIDIA's driver."""

    PROGRAM = "most often caused by a program"
    CLEANUP = "caused by the end of a process"
    NOTICE = "memory was repaired"
    MEMORY = "an error of memory"
    LINK = "an error of a link to other GPUs"
    GPU = "a fault of the GPU itself"


_ACCESS = "most often the program's own access to GPU memory"
_LINKS = "a link to other GPUs reports an error"
XIDS: Mapping[int, Tuple[Xid, str]] = {
    **dict.fromkeys((13, 31, 68, 69), (Xid.PROGRAM, _ACCESS)),
    43: (Xid.PROGRAM, "the program on this GPU was stopped"),
    45: (Xid.CLEANUP, "a process died while it used this GPU"),
    48: (Xid.MEMORY, "an uncorrected error in the memory of this GPU"),
    63: (Xid.NOTICE, "a row of the GPU's memory will be replaced at the next reset"),
    64: (Xid.MEMORY, "a row of the GPU's memory could not be replaced"),
    74: (Xid.LINK, "a link to other GPUs failed"),
    79: (Xid.GPU, "the GPU has fallen off the bus"),
    92: (Xid.NOTICE, "many errors of the GPU's memory were corrected"),
    94: (
        Xid.MEMORY,
        "an error in the memory of this GPU ended the program that ran on it, and no other program",
    ),
    95: (Xid.MEMORY, "an error in the memory of this GPU may have affected other programs"),
    119: (Xid.GPU, "the GPU's own processor (GSP) does not answer"),
    120: (Xid.GPU, "the GPU's own processor (GSP) failed"),
    **dict.fromkeys(range(144, 151), (Xid.LINK, _LINKS)),
}
"""Kinds and meanings of the numbers, in short. https://docs.nvidia.com/deploy/xid-errors/"""
FATAL_XIDS = frozenset((48, 62, 64, 74, 79, 95, 119, 120, 140))
"""Numbers after which, by NVIDIA's list, a GPU works again only once it is reset, repaired or
replaced."""


def match_xid(kind: Xid) -> str:
    """Return a pattern for the driver's lines that have a number of this kind."""
    numbers = sorted(number for number, (one, _) in XIDS.items() if one is kind)
    return rf"\bXid \(.*?\): ({'|'.join(map(str, numbers))})\b"


XID_REMEDIES = {
    Xid.PROGRAM: "run one rank under compute-sanitizer",
    Xid.CLEANUP: "look for the previous error",
}
LAST_TIME = 1e11
"""Seconds since the epoch, later than any sample: the year 5138."""


def make_fault(
    fault: Fault,
    part: Any,
    *,
    count: Optional[int] = None,
    code: Optional[int] = None,
    detail: str = "",
    text: str = "",
    source: str = "",
) -> Finding:
    """Return the finding about a part, which is a GPU's number or the name of a port or module.

    `count` is the number of errors, None if there is nothing to count; `code` the driver's number
    for the fault; `detail` vjob's own word for it, such as the name of a counter; `text` the
    driver's message.
    """
    values: Dict[str, Any] = {"part": str(part)}
    more = {"count": count, "code": code, "detail": detail or None}
    values.update((key, value) for key, value in more.items() if value is not None)
    return Finding(
        rule=fault.value,
        values=values,
        evidence=(Evidence(source, text=text[:300]),),
        remedies=_find_remedies(fault, code),
    )


def is_grave(finding: Finding) -> bool:
    """Return True if the part cannot be used until somebody repairs or resets it."""
    values = finding.values
    if finding.rule == Fault.XID.value:
        return values.get("code") in FATAL_XIDS
    if finding.rule == Fault.REMAP.value:
        return values.get("detail") == "failed"
    return finding.rule in (Fault.LOST.value, Fault.RESET.value, Fault.PORT_DOWN.value)


def dump_faults(faults: Sequence[Finding]) -> list[Dict[str, Any]]:
    """Convert faults to JSON values for a line of GPU samples."""
    return [
        {
            "rule": one.rule,
            **one.values,
            "source": one.evidence[0].source,
            "text": one.evidence[0].text,
        }
        for one in faults
    ]


def parse_fault(value: Mapping[str, Any]) -> Optional[Finding]:
    """Parse a fault from a line of samples; None if it has no fault that this version knows."""
    try:
        fault = Fault(value["rule"])
    except (KeyError, ValueError):
        return None
    values = {
        key: str(one)[:80] if isinstance(one, str) else one
        for key, one in value.items()
        if key not in ("rule", "source", "text")
    }
    if not isinstance(values.get("part"), str):
        return None
    times = [values.get(key) for key in ("since", "last")]
    if not all(isinstance(at, (int, float)) and 0 <= at < LAST_TIME for at in times):
        return None
    if not all(isinstance(values.get(key, 0), int) for key in ("count", "code")):
        return None
    ranks = values.get("ranks", [])
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        return None
    proof = Evidence(str(value.get("source", ""))[:80], text=str(value.get("text", ""))[:300])
    code = values.get("code")
    remedies = _find_remedies(fault, code if isinstance(code, int) else None)
    return Finding(rule=fault.value, values=values, evidence=(proof,), remedies=remedies)


def _find_remedies(fault: Fault, code: Optional[int]) -> tuple[Remedy, ...]:
    kind = XIDS.get(code or 0, (None,))[0] if fault is Fault.XID else None
    if kind in XID_REMEDIES:
        return (Remedy(Action.INSPECT, detail=XID_REMEDIES[kind]),)
    if fault in (Fault.LOST, Fault.RESET):
        reset = Remedy(Action.ASK_ADMIN, detail="to reset the GPU, or to restart the node")
        return (Remedy(Action.EXCLUDE, Target.NODE), reset)
    if fault is Fault.XID and code in FATAL_XIDS:
        return (Remedy(Action.EXCLUDE, Target.NODE), Remedy(Action.TELL_ADMIN))
    return (Remedy(Action.TELL_ADMIN),)

"""Ports of a node's networks and its memory, by the counters that the kernel keeps in /sys.

    class/infiniband/*/ports/*    InfiniBand and RoCE: state, rate, errors, retransmits
    class/net/*                   Ethernet: carrier, speed, errors
    devices/system/edac/mc/mc*    errors of the node's memory

The counters are read once a minute. A port that was down from the start may be unused, and earlier
counts may be those of another run, so only changes since the first reading are faults. The
exception is a port whose rate is below that of all other ports of its make, if there are two or
more of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Mapping, Optional

from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, make_fault

EVERY_S = 60.0
PORT_ERRORS = {
    "link_downed": 1,
    "link_error_recovery": 1,
    "port_rcv_errors": 1,
    "local_link_integrity_errors": 1,
    "excessive_buffer_overrun_errors": 1,
    "symbol_error": 100,
}
"""Error counters of a port, each with the least growth in a minute that is reported."""
PORT_RETRANSMITS = {"local_ack_timeout_err": 1, "packet_seq_err": 60, "out_of_sequence": 600}
"""Counters in the port's folder hw_counters, of messages that had to be sent again, each with the
least growth in a minute that is reported."""
NET_ERRORS = {"rx_errors": 10, "tx_errors": 10, "rx_crc_errors": 1, "tx_carrier_errors": 1}
"""Error counters of an Ethernet device, each with the least growth in a minute that is reported."""
MEMORY_ERRORS = {"ue_count": 1, "ce_count": 100}
"""Counters of memory errors: those that the memory's code could not correct, and those that it
could. Each has the least growth in a minute that is reported."""
UP = ("4: ACTIVE", "up")


@dataclass(frozen=True)
class Port:
    """State and counters of a port at one moment."""

    is_up: bool
    rate: Optional[float] = None
    """Speed of the port in Gbit/s; None if not known."""
    make: str = ""
    """Model of the device; the rates of ports of the same make are compared."""
    counts: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    """For each counter, the least growth in a minute that is reported."""
    fault: Fault = Fault.PORT_ERRORS
    """Kind of fault that growing counters mean."""


class Networks:
    """Finds faults of ports and memory by the changes of counters since the first reading."""

    def __init__(self, root: Path = Path("/sys"), every_s: float = EVERY_S) -> None:
        self._root, self._every_s = root, every_s
        self._looked = 0.0
        self._first: Dict[str, Port] = {}
        self._before: Dict[str, Port] = {}
        self._grown: Dict[str, Dict[str, int]] = {}
        """Growth since the first reading, by port and counter, of the counters that grew enough to
        be reported."""
        self._faults: List[Finding] = []

    def read(self, now: float) -> List[Finding]:
        """Return the faults; the counters are read again if the last reading is a minute old."""
        if not self._looked or now - self._looked >= self._every_s:
            minutes = max(1.0, (now - self._looked) / 60) if self._looked else 1.0
            self._looked = now
            ports = read_ports(self._root)
            self._first = {**ports, **self._first}
            self._note_growth(ports, minutes)
            self._faults = [*self._compare(ports), *self._list_growth()]
            self._before = ports
        return self._faults

    def _note_growth(self, ports: Mapping[str, Port], minutes: float) -> None:
        for name, port in ports.items():
            before = self._before.get(name, port)
            for counter, count in port.counts.items():
                held = self._grown.get(name, {})
                grown = count - before.counts.get(counter, count)
                if grown > 0 and (counter in held or grown >= port.least[counter] * minutes):
                    self._grown.setdefault(name, {})[counter] = held.get(counter, 0) + grown

    def _list_growth(self) -> List[Finding]:
        return [
            make_fault(self._first[name].fault, name, count=count, detail=counter, source="/sys")
            for name, counts in self._grown.items()
            for counter, count in counts.items()
        ]

    def _compare(self, ports: Mapping[str, Port]) -> List[Finding]:
        found = []
        for name, first in self._first.items():
            port = ports.get(name)
            if port is None or not port.is_up:
                if first.is_up:
                    found.append(make_fault(Fault.PORT_DOWN, name, source="/sys"))
                continue
            usual = first.rate
            equals = [one.rate for key, one in ports.items() if key != name and _equal(one, port)]
            if len(equals) > 1 and len(set(equals)) == 1:
                usual = max((rate for rate in (usual, equals[0]) if rate is not None), default=None)
            if port.rate is not None and usual is not None and port.rate < usual:
                detail = f"{port.rate:g} of {usual:g} Gbit/s"
                found.append(make_fault(Fault.PORT_SLOW, name, detail=detail, source="/sys"))
        return found


def _equal(one: Port, other: Port) -> bool:
    return bool(one.make) and one.is_up and one.make == other.make


def read_ports(root: Path) -> Dict[str, Port]:
    """Return the ports and memory controllers by their names: `mlx5_0/1`, `eth0`, `mc0`."""
    found = {}
    for path in sorted(root.glob("class/infiniband/*/ports/*")):
        device = path.parents[1]
        counts = _read_counts(path / "counters", PORT_ERRORS)
        counts.update(_read_counts(path / "hw_counters", PORT_RETRANSMITS))
        words = (_read(device / "hca_type"), _read(device / "board_id"), _read(path / "link_layer"))
        found[f"{device.name}/{path.name}"] = Port(
            is_up=_read(path / "state") in UP,
            rate=_parse_rate(_read(path / "rate")),
            make=" ".join(filter(None, words)) or "?",
            counts=counts,
            least={**PORT_ERRORS, **PORT_RETRANSMITS},
        )
    for path in sorted(root.glob("class/net/*")):
        if not (path / "device").exists():  # bridges, containers' ends and the like
            continue
        speed = _parse_rate(_read(path / "speed"))
        ids = (_read(path / "device" / name) for name in ("vendor", "device"))
        found[path.name] = Port(
            is_up=_read(path / "operstate") in UP,
            rate=speed / 1000 if speed is not None and speed > 0 else None,
            make=" ".join(filter(None, ids)),
            counts={
                **_read_counts(path / "statistics", NET_ERRORS),
                **_read_counts(path, {"carrier_changes": 1}),
            },
            least={**NET_ERRORS, "carrier_changes": 1},
        )
    for path in sorted(root.glob("devices/system/edac/mc/mc*")):
        counts = _read_counts(path, MEMORY_ERRORS)
        found[path.name] = Port(
            is_up=True, counts=counts, least=MEMORY_ERRORS, fault=Fault.HOST_MEMORY
        )
    return found


def _read_counts(folder: Path, names: Mapping[str, int]) -> Dict[str, int]:
    texts = ((name, _read(folder / name)) for name in names)
    return {name: int(text) for name, text in texts if text.isdecimal() and len(text) < 21}


def _parse_rate(text: str) -> Optional[float]:
    """Parse `400 Gb/sec (4X NDR)` or `25000`."""
    word = text.partition(" ")[0]
    try:
        return float(word)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not every port has every file
        return ""

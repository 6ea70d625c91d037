"""Read dumps of torch's Flight Recorder without torch: which collectives each rank has called.

    rank 0    all_reduce 1  all_reduce 2  all_reduce 3  all_reduce 4
    rank 1    all_reduce 1  all_reduce 2  all_reduce 3                  has not called number 4

A dump is JSON, which a rank's thread writes. An entry's `state` is never read: gloo leaves it at
`scheduled` after the collective has ended. Numbers of the same group are compared between ranks, as
a collective needs all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Mapping

DEFAULT = "default_pg"
"""torch's name of the group of all ranks."""


@dataclass(frozen=True)
class Calls:
    """The last collectives that a rank called in one group."""

    group: str
    names: Mapping[int, str]
    """Name by number, such as `all_reduce`."""

    @property
    def last(self) -> int:
        return max(self.names, default=0)


Flight = Mapping[str, Calls]
"""Calls of one rank, by the number of the group, which is the same on all ranks."""


@dataclass(frozen=True)
class Gap:
    """A collective that some ranks of its group called and others did not."""

    group: str
    number: int
    name: str
    called_by: tuple[int, ...]
    missing: tuple[int, ...]
    other: str = ""
    """The other collective that the missing ranks called under this number, if there is one."""


def read_flight(value: Any) -> Flight | None:
    """Return the collective calls in a decoded dump of the Flight Recorder; None for other values.

    Point-to-point messages are ignored, since they have no number.
    """
    entries = value.get("entries") if isinstance(value, dict) else None
    if not isinstance(entries, (list, tuple)):
        return None
    names: dict[str, dict[int, str]] = {}
    groups: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            continue
        number, group = entry.get("collective_seq_id"), entry.get("process_group")
        if not isinstance(number, int) or not isinstance(group, (list, tuple)) or not group:
            continue
        key = str(group[0])
        groups[key] = str(group[1]) if len(group) > 1 and group[1] not in ("", "undefined") else key
        said = str(entry.get("profiling_name", "?"))
        names.setdefault(key, {})[number] = said.partition(":")[2] or said
    return {key: Calls(groups[key], found) for key, found in names.items()}


def find_gap(flights: Mapping[int, Flight], world: int) -> Gap | None:
    """Return the earliest collective that not all ranks called; None if there is none, or if it is
    unknown because a rank of the group left no record."""
    found: list[Gap] = []
    for key in sorted({key for flight in flights.values() for key in flight}):
        calls = {rank: flight[key] for rank, flight in flights.items() if key in flight}
        group = next(iter(calls.values())).group
        if group == DEFAULT:
            if set(flights) != set(range(world)):
                continue
            if any(flight and key not in flight for flight in flights.values()):
                continue  # its calls of this group may be older than what is kept
            calls.update((rank, Calls(group, {})) for rank in flights if rank not in calls)
        gap = _compare(group, calls) if len(calls) > 1 else None
        if gap is not None:
            found.append(gap)
    return min(found, key=lambda gap: (gap.group != DEFAULT, not gap.other), default=None)


def find_last(flights: Mapping[int, Flight]) -> str:
    """Return the last collective of the group of all ranks, such as `all_reduce 5`, or ""."""
    calls = [each for flight in flights.values() for each in flight.values()]
    own = [each for each in calls if each.group == DEFAULT] or calls
    last = max(own, key=lambda each: each.last, default=None)
    return "" if last is None or not last.names else f"{last.names[last.last]} {last.last}"


def _compare(group: str, calls: Mapping[int, Calls]) -> Gap | None:
    for number in sorted({number for each in calls.values() for number in each.names}):
        names = {rank: each.names[number] for rank, each in calls.items() if number in each.names}
        if len(set(names.values())) > 1:
            usual, odd = (name for name, _ in Counter(names.values()).most_common(2))
            called_by = tuple(sorted(rank for rank, name in names.items() if name == usual))
            missing = tuple(sorted(rank for rank in calls if rank not in called_by))
            return Gap(group, number, usual, called_by, missing, odd)
    least, most = min(each.last for each in calls.values()), max(x.last for x in calls.values())
    if least == most:
        return None
    number = least + 1
    called_by = tuple(sorted(rank for rank, each in calls.items() if each.last >= number))
    missing = tuple(sorted(rank for rank in calls if rank not in called_by))
    name = next(
        (calls[rank].names[number] for rank in called_by if number in calls[rank].names), "?"
    )
    return Gap(group, number, name, called_by, missing)

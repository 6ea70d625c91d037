"""Files about ranks that make no steps: `hang/<node>.json`, each agent's observations of its own
ranks, and `state/hang.json`, the hang that the agents found.

An agent writes its file only while a rank of its node has made no step for long, and removes it
when steps continue. Times are durations by the agent's own clock, since hosts' clocks differ.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from typing import Any, Collection, Mapping

from varuna_core.facts.hang import Hang, parse_hang
from varuna_core.hang.flight import Calls, Flight
from varuna_core.records.files import is_listed, read_json, write_first, write_json
from varuna_core.records.runfolder import AttemptFolder, RunFolder


@dataclass(frozen=True)
class RankSigns:
    """An agent's observations of one rank of its node."""

    rank: int
    pid: int
    state: str
    """The kernel's letter for the state of the rank's process, or T if a process that the rank
    started is stopped."""
    channel: str = ""
    """The kernel function in which the rank's main thread waits."""
    silence_s: float = 0.0
    """Seconds since the rank's last step, or since the ranks were started."""
    has_stepped: bool = False
    halted_s: float = 0.0
    """Seconds for which the rank has been stopped or dead; 0 if it is neither."""
    still_s: float = 0.0
    """Seconds for which the rank has used no processor time, moved no bytes and stayed at the same
    place; a rank in a collective may use processor time."""
    is_watched: bool = False
    """True if a debugger holds the rank, or may: a tracer, a prompt or a controlling terminal."""
    waits: bool = False
    """True if the rank is idle, or within a call of torch.distributed."""
    in_collective: bool = False
    """True if the rank's main thread is within a call of torch.distributed."""
    is_mute: bool = False
    """True if vjob's thread in the rank has not answered for MUTE_S: native code holds the
    interpreter, or the rank is stopped."""
    prints: bool = False
    """True if the rank has recently printed a line, outside of collectives."""
    spins: bool = False
    """True if the rank's main thread is in a loop that cannot end by itself and no other thread of
    the rank runs: the rank waits, however much processor time the loop takes."""
    below: int = 0
    """Pid of the stopped process below the rank if that is the reason for `state`; else 0."""
    has_joined: bool = False
    """True if the rank is connected to the master's port or listens on it; before its first steps
    only."""
    place: str = ""
    """Innermost frame of the rank's main thread: `sleep (train.py:33)`; empty if the rank could not
    be asked."""
    calls: Flight = field(default_factory=dict)


@dataclass(frozen=True)
class NodeSigns:
    """The observations that the agent of one node makes of all its ranks."""

    index: int
    node: str
    count: int
    """Counter that each write of the file increments."""
    longest_s: float
    """Longest time in seconds between two steps so far."""
    ranks: tuple[RankSigns, ...]
    quiet_s: float = 0.0
    """Longest time in seconds for which a rank was idle outside of collectives before it
    continued."""


def write_signs(attempt: AttemptFolder, signs: NodeSigns) -> None:
    """Write the observations of this node's ranks; raise OSError if the disk is full or the folder
    was removed."""
    path = attempt.hang_signs(signs.index)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_json(path, asdict(signs), lasts=False)


def remove_signs(attempt: AttemptFolder, index: int) -> None:
    with contextlib.suppress(OSError):
        attempt.hang_signs(index).unlink()


def read_signs(attempt: AttemptFolder, num_nodes: int) -> dict[int, NodeSigns]:
    """Read the agents' observations of their ranks, for the nodes that have written some, keyed by
    the index of the node."""
    found = {}
    for index in range(num_nodes):
        path = attempt.hang_signs(index)
        signs = parse_signs(read_json(path)) if is_listed(path) else None
        if signs is not None:
            found[index] = signs
    return found


def parse_signs(value: Any) -> NodeSigns | None:
    """Parse a node's observations of its ranks; None if they are damaged or of another version."""
    try:
        ranks = tuple(_parse_rank(one) for one in value["ranks"])
        return NodeSigns(
            index=int(value["index"]),
            node=str(value["node"]),
            count=int(value["count"]),
            longest_s=float(value["longest_s"]),
            ranks=ranks,
            quiet_s=float(value.get("quiet_s", 0.0)),
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _parse_rank(value: Mapping[str, Any]) -> RankSigns:
    calls = {
        str(key): Calls(str(one["group"]), {int(n): str(x) for n, x in one["names"].items()})
        for key, one in value.get("calls", {}).items()
    }
    return RankSigns(**{**value, "calls": calls})


def read_hang(attempt: AttemptFolder) -> Hang | None:
    """Read the hang that the agents found; return None if there is none."""
    return parse_hang(read_json(attempt.hang)) if is_listed(attempt.hang) else None


def write_hang(attempt: AttemptFolder, hang: Hang) -> bool:
    """Record a hang; return False if a hang that is not over has been recorded already."""
    before = read_hang(attempt)
    if before is None:
        return write_first(attempt.hang, hang.as_json())
    if before.until is None:
        return False
    write_json(attempt.hang, hang.as_json())
    return True


def end_hang(attempt: AttemptFolder, hang: Hang) -> None:
    """Update the recorded hang to say that it is over, since steps are made again."""
    with contextlib.suppress(OSError):
        write_json(attempt.hang, hang.as_json())


def tell_suspicion(attempt: AttemptFolder, hang: Hang | None) -> None:
    """Record a suspected hang; if `hang` is None, delete the record, as none is suspected."""
    with contextlib.suppress(OSError):
        if hang is None:
            attempt.hanging.unlink()
        else:
            write_json(attempt.hanging, hang.as_json(), lasts=False)


def write_cut(attempt: AttemptFolder, nodes: Collection[int]) -> None:
    """Record which nodes have no connection although other nodes have one."""
    with contextlib.suppress(OSError):
        write_json(attempt.cut, {"nodes": sorted(nodes)}, lasts=False)


def read_cut(attempt: AttemptFolder) -> frozenset[int]:
    value = read_json(attempt.cut) if is_listed(attempt.cut) else None
    nodes = value.get("nodes") if isinstance(value, dict) else None
    return frozenset(one for one in nodes or () if isinstance(one, int))


def pause_guard(run: RunFolder, *, is_paused: bool, by: str, at: float) -> None:
    """Record if agents are forbidden to act on hangs of this run (`is_paused`) or allowed again."""
    write_json(run.hang_guard, {"is_paused": is_paused, "by": by, "time": at})


def is_guard_paused(run: RunFolder) -> bool:
    value = read_json(run.hang_guard) if is_listed(run.hang_guard) else None
    return isinstance(value, dict) and value.get("is_paused") is True

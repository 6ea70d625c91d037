"""Files about ranks that stand: `hang/<node>.json`, what each agent sees of its own, and
`state/hang.json`, what was decided.

An agent writes its file only while a rank of its node has made no step for long, and removes it
when the steps go on. Times are durations by the agent's own clock, for clocks of hosts differ.
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
    """The signs that an agent sees of one rank."""

    rank: int
    pid: int
    state: str
    """The kernel's letter: of the process, or T where one below it is stopped."""
    channel: str = ""
    """The kernel function in which its main thread waits."""
    silence_s: float = 0.0
    """Since its last step, or since the ranks were started."""
    has_stepped: bool = False
    halted_s: float = 0.0
    """For how long it has been stopped or dead; 0 where it is not."""
    still_s: float = 0.0
    """For how long it used no processor time, moved no bytes and stood in the same place; a rank in
    a collective may use processor time."""
    is_watched: bool = False
    """A debugger has it, or may have: a tracer, a prompt, a terminal that controls it."""
    waits: bool = False
    """It is idle, or within a call of torch.distributed."""
    in_collective: bool = False
    """Its main thread is within a call of torch.distributed."""
    is_mute: bool = False
    """A thread of ours listens in it, and has not answered for MUTE_S: native code holds its
    interpreter, or it is stopped."""
    prints: bool = False
    """It printed a line of late, outside of collectives."""
    spins: bool = False
    """Its main thread is in a loop that cannot end by its own doing, and nothing else of it runs:
    it waits, however much processor time that takes."""
    below: int = 0
    """The stopped process below it, where that is the reason for its state."""
    has_joined: bool = False
    """It has a connection to the master's port, or listens there; only before its first steps."""
    place: str = ""
    """Innermost frame of its main thread: `sleep (train.py:33)`; empty where nobody could ask."""
    calls: Flight = field(default_factory=dict)


@dataclass(frozen=True)
class NodeSigns:
    """The signs that the agent of one node sees of all its ranks."""

    index: int
    node: str
    count: int
    """Raised by each writing."""
    longest_s: float
    """Longest time between two steps so far."""
    ranks: tuple[RankSigns, ...]
    quiet_s: float = 0.0
    """Longest time so far that one of them did nothing, outside of collectives, and went on."""


def write_signs(attempt: AttemptFolder, signs: NodeSigns) -> None:
    """OSError where there is no room, or no folder any more."""
    path = attempt.hang_signs(signs.index)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_json(path, asdict(signs), lasts=False)


def remove_signs(attempt: AttemptFolder, index: int) -> None:
    with contextlib.suppress(OSError):
        attempt.hang_signs(index).unlink()


def read_signs(attempt: AttemptFolder, num_nodes: int) -> dict[int, NodeSigns]:
    """The files that are there, by node."""
    found = {}
    for index in range(num_nodes):
        path = attempt.hang_signs(index)
        signs = parse_signs(read_json(path)) if is_listed(path) else None
        if signs is not None:
            found[index] = signs
    return found


def parse_signs(value: Any) -> NodeSigns | None:
    """One file; None where it is damaged, or of another version."""
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
    """The hang that the agents found; None where there is none."""
    return parse_hang(read_json(attempt.hang)) if is_listed(attempt.hang) else None


def write_hang(attempt: AttemptFolder, hang: Hang) -> bool:
    """Say it once: False where somebody did before, of a hang that is not over."""
    before = read_hang(attempt)
    if before is None:
        return write_first(attempt.hang, hang.as_json())
    if before.until is None:
        return False
    write_json(attempt.hang, hang.as_json())
    return True


def end_hang(attempt: AttemptFolder, hang: Hang) -> None:
    """The steps go on; the file keeps what was seen."""
    with contextlib.suppress(OSError):
        write_json(attempt.hang, hang.as_json())


def tell_suspicion(attempt: AttemptFolder, hang: Hang | None) -> None:
    """Say what will be done, and when, or that nothing will."""
    with contextlib.suppress(OSError):
        if hang is None:
            attempt.hanging.unlink()
        else:
            write_json(attempt.hanging, hang.as_json(), lasts=False)


def write_cut(attempt: AttemptFolder, nodes: Collection[int]) -> None:
    """Say which nodes have no connection, though others have one."""
    with contextlib.suppress(OSError):
        write_json(attempt.cut, {"nodes": sorted(nodes)}, lasts=False)


def read_cut(attempt: AttemptFolder) -> frozenset[int]:
    value = read_json(attempt.cut) if is_listed(attempt.cut) else None
    nodes = value.get("nodes") if isinstance(value, dict) else None
    return frozenset(one for one in nodes or () if isinstance(one, int))


def pause_guard(run: RunFolder, *, is_paused: bool, by: str, at: float) -> None:
    """Say whether agents may act on hangs of this run."""
    write_json(run.hang_guard, {"is_paused": is_paused, "by": by, "time": at})


def is_guard_paused(run: RunFolder) -> bool:
    value = read_json(run.hang_guard) if is_listed(run.hang_guard) else None
    return isinstance(value, dict) and value.get("is_paused") is True

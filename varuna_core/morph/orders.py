"""Orders and presences: files by which manager and nodes talk, each with one writer.

    nodes/<seat>.json   an agent's sign of life: who it is, which attempt it runs or has ended
    orders.json         the manager's word to all: which attempt, who takes part, who is out

A seat is a node's index in the run's plan. An agent makes itself a key when it starts, and seat and
key name it: the agent that takes over a seat is another node, and one that was fenced stays so.
The session is the one start of the batch script that an agent belongs to. Agents of another job of
the run (one that joined, the other groups of a split run) are guests: they have no session of their
own, and take part in that of the orders, one after the other. No port is opened: who can write
these files (0600, in a folder of 0700) is the run's own user.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, NamedTuple, Optional, Tuple

from varuna_core.records.files import list_names, read_json, write_json
from varuna_core.records.morphing import name_node
from varuna_core.records.runfolder import MorphFolder

IDLE, RUNNING, ENDED, GONE = "idle", "running", "ended", "gone"
"""Of an agent; the last one is its last word, so that nobody waits for its silence."""


@dataclass(frozen=True)
class Presence:
    """nodes/<seat>.json."""

    seat: int
    key: str
    session: str
    host: str
    pid: int
    count: int
    """Counts up; how long ago it did is measured by the reader's own clock."""
    state: str
    attempt: int
    """The last one that this agent started or ended; -1 before the first."""
    code: int
    held: Tuple[str, ...] = ()
    """What of the training lies in the node's memory (records/memory_copies.py)."""

    @property
    def name(self) -> str:
        return name_node(self.seat, self.key)


@dataclass(frozen=True)
class Orders:
    """orders.json."""

    session: str
    attempt: int
    nodes: Tuple[str, ...]
    """Who takes part: the first has node index 0 in the attempt's plan, and so on."""
    fenced: Tuple[str, ...]
    end: bool
    back: bool = False
    """At the end: whether the run comes back in another session."""
    beat: float = 0.0
    """Another number each time: as long as it changes the manager lives."""
    ending: bool = False
    """Whether the attempt is being stopped: nodes then give a sign of life at each look."""
    trained: bool = False
    """Whether the attempt has done a step: from then on nodes prepare for the next one."""


class Task(NamedTuple):
    """What the orders mean for one agent."""

    attempt: Optional[int]
    node: int
    """Its index in the attempt's plan."""
    leave: str
    """Why it is to leave; empty where it is not."""


WAIT = Task(None, 0, "")


def write_presence(folder: MorphFolder, value: Presence) -> None:
    write_json(folder.node(value.seat), asdict(value), lasts=False)


def read_presences(folder: MorphFolder, session: str) -> Dict[int, Presence]:
    """The agents of this session that gave a sign of life, by seat."""
    found = {}
    for name in list_names(folder.nodes):
        value = read_json(folder.nodes / name) if name[:-5].isdigit() else None
        presence = _parse(Presence, value)
        if presence is not None and presence.session == session:
            found[presence.seat] = replace(presence, held=tuple(presence.held))
    return found


def read_leave(folder: MorphFolder) -> Dict[int, str]:
    """Seats whose nodes were asked to leave, and why where no person did."""
    found = {}
    for name in list_names(folder.leave(0).parent):
        if name[:-5].isdigit():
            value = read_json(folder.leave(int(name[:-5])))
            found[int(name[:-5])] = str(value.get("why", "")) if isinstance(value, dict) else ""
    return found


def write_orders(folder: MorphFolder, value: Orders) -> None:
    write_json(folder.orders, asdict(value))


def read_orders(folder: MorphFolder) -> Optional[Orders]:
    list_names(folder.path)  # makes NFS look anew
    found = _parse(Orders, read_json(folder.orders))
    if not isinstance(found, Orders):
        return None
    return replace(found, nodes=tuple(found.nodes), fenced=tuple(found.fenced))


def follow(orders: Optional[Orders], me: Presence, *, knows_session: bool) -> Task:
    """Find what this agent does now. `knows_session`: it has seen orders of its own session before.

    Orders of another session mean that the run went on without us; before we saw our own, they are
    only what the session before left behind.
    """
    if orders is None:
        return WAIT
    if orders.session != me.session:
        return Task(None, 0, "the run went on in another job") if knows_session else WAIT
    if me.name in orders.fenced:
        return Task(None, 0, "this node was taken out of the run")
    if orders.end:
        return Task(None, 0, "the run has ended")
    if orders.attempt > me.attempt and me.name in orders.nodes:
        return Task(orders.attempt, orders.nodes.index(me.name), "")
    return WAIT


def is_for_guest(orders: Orders, me: Presence) -> bool:
    """True if a guest is to go over to the session of these orders, as another node.

    One that came while the run was away waits for the session after it.
    """
    return orders.session != me.session and not (orders.end and orders.back)


def _parse(kind: Any, value: Any) -> Any:
    try:
        return kind(**value) if isinstance(value, dict) else None
    except TypeError:
        return None  # of another version: as good as missing

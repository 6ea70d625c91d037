"""Orders and presences: the files by which the manager and the nodes communicate, each with a
single writer.

    nodes/<seat>.json        an agent's sign of life: who it is, which attempt it runs or has ended
    epochs/<n>.orders.json   the manager's word to all: which attempt, who takes part, who is out

A seat is a node's index in the run's plan. An agent chooses a random key when it starts, and is
named by seat and key: an agent that takes over a seat counts as another node, and a fenced node
stays fenced. A session is one start of the batch script, to which an agent belongs. Agents of
another job of the run (a job that joined, or the other groups of a split run) are guests: they have
no session of their own, and take part in the session that the orders name. An epoch is one start of
a manager: the epoch that was claimed last counts, and an agent never returns to an earlier one
(`Newest`). Connections carry the same content (links.py), so that files are written and read
seldom. Whoever can write these files (0600, in a folder of 0700), or knows the secret beside them,
is the run's own user.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import AbstractSet, Any, Dict, NamedTuple, Optional, Tuple

from varuna_core.records.files import list_names, make, read_json, write_json
from varuna_core.records.morphing import name_node, read_claim, read_newest_epoch
from varuna_core.records.runfolder import MorphFolder

IDLE, RUNNING, ENDED, GONE = "idle", "running", "ended", "gone"
"""States of an agent; GONE is sent at its end, so that nobody waits for more signs of life."""


@dataclass(frozen=True)
class Presence:
    """Content of nodes/<seat>.json: an agent's sign of life."""

    seat: int
    key: str
    session: str
    host: str
    pid: int
    count: int
    """Counter of signs of life; readers measure its age by their own clock."""
    state: str
    attempt: int
    """The last attempt that this agent started or ended; -1 before the first."""
    code: int

    @property
    def name(self) -> str:
        return name_node(self.seat, self.key)


@dataclass(frozen=True)
class Orders:
    """Content of <epoch>.orders.json: the manager's orders to all nodes."""

    session: str
    attempt: int
    """The attempt to run; -1 for none."""
    nodes: Tuple[str, ...]
    """Nodes that take part, by their index in the attempt's plan."""
    fenced: Tuple[str, ...]
    end: bool
    back: bool = False
    """True if the run ends in this session and continues in another one; only set at the end."""
    beat: float = 0.0
    """Number that changes as long as the manager lives."""
    ending: bool = False
    """True if the attempt is being stopped; nodes then give a sign of life at each look."""
    trained: bool = False
    """True if the attempt has done a step; nodes then prepare for the next attempt."""
    epoch: int = -1
    """The manager's epoch; orders of the latest one count."""
    first: int = 0
    """Index of the first of `nodes` in the attempt's plan. Over a connection, `nodes` contains only
    the receiving node."""

    def find_place(self, node: str) -> Optional[int]:
        """Return the node's index in the attempt's plan; None if it takes no part."""
        return self.first + self.nodes.index(node) if node in self.nodes else None


class Task(NamedTuple):
    """An agent's task according to the orders."""

    attempt: Optional[int]
    node: int
    """The node's index in the attempt's plan."""
    leave: str
    """Why the agent is to leave; empty if it is not."""


WAIT = Task(None, 0, "")


def write_presence(folder: MorphFolder, value: Presence) -> None:
    write_json(folder.node(value.seat), asdict(value), lasts=False)


def read_presences(
    folder: MorphFolder, session: str, besides: AbstractSet[int] = frozenset()
) -> Dict[int, Presence]:
    """Return the presences of this session's agents by seat, except seats in `besides`, which are
    connected."""
    found = {}
    for name in list_names(folder.nodes):
        is_asked = name[:-5].isdecimal() and int(name[:-5]) not in besides
        value = read_json(folder.nodes / name) if is_asked else None
        presence = parse_presence(value)
        if presence is not None and presence.session == session:
            found[presence.seat] = presence
    return found


def parse_presence(value: Any) -> Optional[Presence]:
    """Parse the content of a presence file; None if it is of another kind."""
    presence = make(Presence, value)
    return presence if isinstance(presence, Presence) else None


def read_leave(folder: MorphFolder) -> Dict[int, str]:
    """Return the seats that were asked to leave, with the reason unless a person asked."""
    found = {}
    for name in list_names(folder.leave(0).parent):
        if name[:-5].isdecimal():
            value = read_json(folder.leave(int(name[:-5])))
            found[int(name[:-5])] = str(value.get("why", "")) if isinstance(value, dict) else ""
    return found


def write_orders(folder: MorphFolder, value: Orders) -> None:
    write_json(folder.orders(value.epoch), asdict(value))


def read_orders(folder: MorphFolder) -> Optional[Orders]:
    """Return the orders of the newest epoch; orders to do nothing if it has none yet."""
    epoch = read_newest_epoch(folder)
    found = parse_orders(read_json(folder.orders(epoch)))
    if found is not None:
        return found
    claim = read_claim(folder, epoch)
    if claim is None:
        return None
    return Orders(claim.session, -1, (), (), end=False, epoch=epoch)


def parse_orders(value: Any) -> Optional[Orders]:
    """Parse the content of an orders file; None if it is of another kind."""
    found = make(Orders, value)
    if not isinstance(found, Orders):
        return None
    return replace(found, nodes=tuple(found.nodes), fenced=tuple(found.fenced))


class Newest:
    """Keeps the newest orders that an agent has seen; orders of earlier epochs are ignored."""

    def __init__(self) -> None:
        self.epoch = -1

    def take(self, orders: Optional[Orders]) -> Optional[Orders]:
        if orders is None or orders.epoch < self.epoch:
            return None
        self.epoch = orders.epoch
        return orders


def follow(orders: Optional[Orders], me: Presence, *, knows_session: bool) -> Task:
    """Return what this agent is to do now. `knows_session`: it has seen its own session's orders.

    Orders of another session then mean that the run continues without us; before, they are only
    what the previous session left behind.
    """
    if orders is None:
        return WAIT
    if orders.session != me.session:
        return Task(None, 0, "the run went on in another job") if knows_session else WAIT
    if me.name in orders.fenced:
        return Task(None, 0, "this node was taken out of the run")
    if orders.end:
        return Task(None, 0, "the run has ended")
    place = orders.find_place(me.name)
    if orders.attempt > me.attempt and place is not None:
        return Task(orders.attempt, place, "")
    return WAIT


def is_for_guest(orders: Orders, me: Presence) -> bool:
    """Return True if a guest is to join the session of these orders, as another node.

    A guest that came while the run was away waits for the next session.
    """
    return orders.session != me.session and not (orders.end and orders.back)

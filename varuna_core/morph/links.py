"""Connections of a run that may morph: the manager is the hub of all daemons and their agents.

    daemon of a seat      presence, each beat          ──► manager
                          ◄── orders, at each change, with no node's name but its own
    agent of an attempt   a sign of life, "look"       ──► manager
                          ◄── the attempt's stop and signal

A daemon or agent without a connection reads and writes the files instead (orders.py). While all
nodes are connected and the ranks train, the manager reads the run folder seldom, and at once if a
process asks for that.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set

from varuna_core.agent.meeting.link import (
    Hub,
    Member,
    compute_silence_s,
    publish_place,
    raise_descriptor_limit,
    read_place,
)
from varuna_core.agent.meeting.opening import choose_address
from varuna_core.agent.meeting.watch import FolderNews
from varuna_core.agent.setup.site import Refusal
from varuna_core.morph.orders import GONE, Orders, Presence, parse_orders, parse_presence
from varuna_core.records.morphing import ManagerState
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder

FILE_S = 60.0
"""Seconds between signs of life in a file if a connection carries them too."""
LOOK_S, NODES_LOOK_S = 2.0, 60.0
"""Least seconds between two looks for requests while all nodes are connected, and the seconds for a
run with one node, which are divided by the number of nodes."""
FULL_LOOK_S = 120.0
"""Seconds between looks at the whole run folder."""


def name_agent(attempt: int, index: int) -> str:
    return f"attempt-{attempt}-{index}"


class ManagerLink:
    """Connections of a run's manager to the daemon of each node: the last state that each daemon
    sent, and messages from the manager to all daemons."""

    def __init__(self, run: RunFolder, plan: Plan, say: Callable[[str], object]) -> None:
        self._run, self._plan, self._say = run, plan, say
        self._hub: Optional[Hub] = None
        self._presences: Dict[str, Presence] = {}
        """Presences by connection; the last one of an ended connection is kept."""
        self._by_seat: Dict[int, Set[str]] = {}
        """Connections that had a presence, by seat."""
        self._orders: Optional[Orders] = None
        self._places: Dict[str, int] = {}
        """Index in the attempt's plan of each node that takes part."""
        self.closed: Dict[str, int] = {}
        """Count of the last sign of life of each node whose connection the node's side has closed,
        until the node sends another sign of life."""
        self._done: Set[str] = set()
        """Agents that left because their ranks ended."""
        self._callers: List[str] = []
        self.is_asked = False
        """True if a request was written since the last look."""

    def open(self) -> None:
        """Listen for connections; without an address or port everything goes through files."""
        plan = self._plan
        try:
            address = choose_address(plan, os.uname().nodename, os.environ, plan.address)
            raise_descriptor_limit(2 * plan.num_nodes)
            silent_s = compute_silence_s(plan.timing.lost_s)
            self._hub = Hub(address, num_members=2 * plan.num_nodes, silent_s=silent_s)
            publish_place(self._run.morph.link, self._hub.place)
        except (OSError, Refusal) as error:
            self._say(f"no connections ({error}): files are used instead")
            self.close()

    @property
    def fds(self) -> List[int]:
        """File descriptors that are readable when `step` has something to do."""
        return [] if self._hub is None else [self._hub.fileno()]

    def step(self) -> None:
        """Handle messages from daemons and agents."""
        if self._hub is None:
            return
        for name, line in self._hub.step(time.monotonic()):
            if line.get("look"):
                self.is_asked = True
                self._callers.append(name)
            if line.get("state") == "done":
                self._done.add(name)
            presence = parse_presence(line.get("presence"))
            if presence is not None:
                self._take_presence(name, presence, asks=bool(line.get("asks")))
        for name in self._hub.take_hung_up():
            if name in self._presences and not self._hub.has(name):
                presence = self._presences[name]
                self.closed[presence.name] = presence.count

    def _take_presence(self, name: str, presence: Presence, *, asks: bool) -> None:
        assert self._hub is not None
        here = self._by_seat.setdefault(presence.seat, set())
        for other in [other for other in here if not self._hub.has(other)]:
            here.remove(other)
            del self._presences[other]
        here.add(name)
        self._presences[name] = presence
        self.closed.pop(presence.name, None)
        if asks:
            self._send_orders(name)

    def list_seats(self) -> Set[int]:
        """Return the seats whose daemons are connected."""
        names = set() if self._hub is None else set(self._hub.names)
        return {item.seat for name, item in self._presences.items() if name in names}

    def merge(self, files: Dict[int, Presence], session: str) -> Dict[int, Presence]:
        """Merge presences from files and connections, keeping the later one of each node."""
        found = dict(files)
        linked = set() if self._hub is None else set(self._hub.names)
        for name, presence in self._presences.items():
            if presence.session != session:
                continue
            known = found.get(presence.seat)
            is_later = known is None or (
                presence.count > known.count if presence.name == known.name else name in linked
            )
            if is_later:
                found[presence.seat] = presence
        return found

    def is_complete(self, state: ManagerState) -> bool:
        """Return True while all nodes and the agents of those with running ranks are connected."""
        if self._hub is None:
            return False
        names = set(self._hub.names)
        here = {item.name for name, item in self._presences.items() if name in names}
        agents = {name_agent(state.attempt, index) for index in range(len(state.members))}
        return here.issuperset(state.nodes) and agents <= names | self._done

    def has_newcomer(self, state: ManagerState) -> bool:
        """True if a node of this session is connected that the manager has yet to count."""
        known = {*state.nodes, *state.fenced}
        names = set() if self._hub is None else set(self._hub.names)
        return any(
            item.session == state.session and item.state != GONE and item.name not in known
            for name, item in self._presences.items()
            if name in names
        )

    def tell_orders(self, orders: Orders) -> None:
        """Send orders if they have changed; the hub adds its own sign of life."""
        orders = replace(orders, beat=0.0)
        if self._hub is not None and orders != self._orders:
            self._orders = orders
            self._places = {node: at for at, node in enumerate(orders.nodes)}
            for name in self._presences:
                self._send_orders(name)

    def _send_orders(self, name: str) -> None:
        """Send one daemon the orders without other nodes' names: there may be thousands of both."""
        if self._hub is None or self._orders is None:
            return
        node = self._presences[name].name
        at = self._places.get(node)
        nodes = () if at is None else (node,)
        fenced = (node,) if node in self._orders.fenced else ()
        own = replace(self._orders, nodes=nodes, first=at or 0, fenced=fenced)
        self._hub.answer(name, {"topic": "orders", "value": asdict(own)})

    def tell_requests(self, number: int, asked: Any, stop: Any) -> None:
        """Send the members the attempt's signal and stop request, as they are in the attempt's
        folder."""
        if self._hub is not None:
            self._hub.say("attempt", {"attempt": number, "stop": stop, "signal": asked})

    def answer(self) -> None:
        """Tell the members that asked for it that the run folder has been read."""
        self.is_asked = False
        if self._hub is None:
            return
        callers, self._callers = self._callers, []
        for name in callers:
            self._hub.answer(name, {"looked": True})

    def beat(self) -> None:
        if self._hub is not None:
            self._hub.beat(time.monotonic())

    def close(self) -> None:
        if self._hub is not None:
            self._hub.close()
            with contextlib.suppress(OSError):
                if read_place(self._run.morph.link) == self._hub.place:
                    self._run.morph.link.unlink()
        self._hub = None


class Calm:
    """Decides when the manager reads the run folder: in each round or, while all nodes are
    connected and the ranks train, seldom."""

    def __init__(self, run: RunFolder, plan: Plan, epoch: int) -> None:
        self._run, self._epoch = run, epoch
        self._look_s = max(LOOK_S, NODES_LOOK_S / plan.num_nodes)
        self._next_look = self._next_full = 0.0
        self._news: Dict[Path, FolderNews] = {}
        self._attempt = -1

    def must_look(self, attempt: AttemptFolder, now: float) -> bool:
        """Return True if the run folder must be read although all is calm: its files may have
        changed, or a full reading is due."""
        if attempt.number != self._attempt:
            self._attempt, self._news = attempt.number, {}
        if now >= self._next_full:
            self._next_full, self._next_look = now + FULL_LOOK_S, now + self._look_s
            return True
        if now < self._next_look:
            return False
        self._next_look = now + self._look_s
        news = [self._has_news(path, now) for path in self._list_folders(attempt)]
        return any(news) or self._is_claimed()

    def _list_folders(self, attempt: AttemptFolder) -> List[Path]:
        return [attempt.stop.parent, self._run.morph.leave(0).parent]

    def _is_claimed(self) -> bool:
        """Return True if a later manager owns the run. Our orders change the folder's times, so the
        next claim is looked for by name; opening the folder refreshes an NFS client's view."""
        try:
            os.close(os.open(self._run.morph.epochs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            os.stat(self._run.morph.claim(self._epoch + 1))
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def _has_news(self, folder: Path, now: float) -> bool:
        news = self._news.setdefault(folder, FolderNews(folder, float("inf")))
        try:
            return news.look(now)
        except OSError:
            return True


class DaemonLink:
    """A daemon's connection to the manager."""

    def __init__(
        self, run: RunFolder, plan: Plan, me: Presence, say: Callable[[str], object]
    ) -> None:
        path, silent_s = run.morph.link, compute_silence_s(plan.timing.lost_s)
        name = f"seat-{me.seat}-{me.key}"
        self._member = Member(lambda: read_place(path), name, silent_s, say)
        self._me = me
        self._has_asked = False
        """True once the manager that is connected was asked for this node's orders."""
        self._orders: Optional[Orders] = None
        self._beat = 0.0

    @property
    def fds(self) -> List[int]:
        return [self._member.fileno()]

    @property
    def is_up(self) -> bool:
        """True while the manager is connected and has sent its orders."""
        return self._member.is_up and self._orders is not None

    @property
    def orders(self) -> Optional[Orders]:
        """The manager's last orders, with no other node's name, and with a sign of life that
        changes while the manager lives."""
        return None if self._orders is None else replace(self._orders, beat=self._beat)

    def step(self) -> None:
        now = time.monotonic()
        for line in self._member.step(now):
            self._beat += 1.0  # another number each time
            if line.get("topic") == "orders":
                self._orders = parse_orders(line.get("value"))
        if not self._member.is_up:
            self._orders, self._has_asked = None, False
        elif not self._has_asked:
            self.tell(self._me)

    def tell(self, me: Presence) -> None:
        asks = not self._has_asked or me.name != self._me.name
        self._me, self._has_asked = me, self._member.is_up
        self._member.send({"presence": asdict(me), "asks": asks})

    def close(self) -> None:
        self._member.close()

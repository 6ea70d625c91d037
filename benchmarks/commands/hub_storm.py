"""The hub of a run's agents under a storm of connections that prove nothing; see storm.py.

Members send numbered messages meanwhile, and new ones join. One member's connection is recorded,
and the storm replays the recording beside garbage. A message that the hub takes must be the next of
its member.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

from varuna_core.agent.meeting.link import Hub, Member, Place

NUM_MEMBERS = 16
SILENT_S = 30.0


def forge(recorded: bytes, random: Random) -> bytes:
    """Bytes of a stranger: garbage, a forged proof, or a recording of a true member."""
    forms: Sequence[Callable[[], bytes]] = (
        lambda: recorded,
        lambda: b"x" * 100_000,
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: random.randbytes(200) + b"\n",
        lambda: f"{secrets.token_hex(32)} member-0 {secrets.token_hex(32)}\n".encode(),
        lambda: b"\n" * 200,
        lambda: b"half a li",
    )
    return random.choice(forms)()


def open_links(number: int) -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """Yield sockets without end, with those before it that are open: `number` at most, or as many
    as the machine lets us."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    links = list[socket.socket]()
    while True:
        if len(links) >= min(number, most - 50):
            for link in links[: number // 10]:
                link.close()
            del links[: number // 10]
        links.append(socket.socket())
        yield links[-1], links


def storm(port: int, number: int, recorded: bytes, began: Any) -> None:
    """Open connections until killed, `number` at once, each with forged bytes."""
    random = Random(1)
    for link, _ in open_links(number):
        with contextlib.suppress(OSError):
            link.settimeout(0.2)
            link.connect(("127.0.0.1", port))
            link.setblocking(False)
            link.send(forge(recorded, random))
        began.value += 1


class Relay:
    """A connection between a member and the hub that keeps what the member sent."""

    def __init__(self, hub: Place) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = hub._replace(port=self._listener.getsockname()[1])
        self._hub, self.recorded = hub, b""
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        member, _ = self._listener.accept()
        with member, socket.create_connection((self._hub.address, self._hub.port)) as hub:
            while True:
                for ready in select.select([member, hub], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    self.recorded += data if ready is member else b""
                    (hub if ready is member else member).sendall(data)


@dataclass
class Meeting:
    """A hub with its members, driven from one thread."""

    hub: Hub
    members: dict[str, Member] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    num_foreign: int = 0
    """Messages that were not the next of a member."""

    def add(self, name: str, place: Place) -> None:
        self.members[name], self.sent[name] = Member(lambda: place, name, SILENT_S), 0

    def turn(self) -> None:
        now = time.monotonic()
        self.hub.beat(now)
        for name, value in self.hub.step(now):
            is_next = value == {"number": self.taken.get(name, 0)} and name in self.members
            self.num_foreign += not is_next
            self.taken[name] = self.taken.get(name, 0) + 1
        for member in self.members.values():
            member.step(now)
        select.select([self.hub.fileno()], [], [], 0.001)

    def send(self, name: str) -> float:
        """Return the seconds until the hub has the member's next message; the member joins before,
        if it is new."""
        start = time.monotonic()
        while not self.members[name].is_up:
            self.turn()
        self.members[name].send({"number": self.sent[name]})
        self.sent[name] += 1
        while self.taken.get(name, 0) < self.sent[name]:
            self.turn()
        return time.monotonic() - start


def measure(connections: int, asks: int) -> list[str]:
    """Return the lines of the page."""
    hub = Hub("127.0.0.1", num_members=NUM_MEMBERS + asks, silent_s=SILENT_S)
    meeting, relay = Meeting(hub), Relay(hub.place)
    for number in range(NUM_MEMBERS):
        meeting.add(f"member-{number}", relay.place if number == 0 else hub.place)
    calm = [meeting.send(name) for name in [*meeting.members] * 3]
    began = multiprocessing.Value("q", 0)
    words = (hub.place.port, connections, relay.recorded, began)
    other = multiprocessing.Process(target=storm, args=words, daemon=True)
    other.start()
    while began.value < connections:
        meeting.turn()
    first, start = began.value, time.monotonic()
    old, new = [], []
    for number in range(asks):
        old.append(meeting.send(f"member-{number % NUM_MEMBERS}"))
        meeting.add(f"new-{number}", hub.place)
        new.append(meeting.send(f"new-{number}"))
    rate = (began.value - first) / (time.monotonic() - start)
    other.kill()
    other.join()
    num_lost = sum(not member.is_up for member in meeting.members.values())
    for member in meeting.members.values():
        member.close()
    hub.close()
    return [
        "## The hub of the agents",
        "",
        f"{connections} connections that prove nothing, with garbage, forged proofs, and a "
        f"recording of a true member ({len(relay.recorded)} bytes); {rate:.0f} new ones a second "
        f"meanwhile. {NUM_MEMBERS} members are connected, and {asks} new ones join.",
        "",
        "| seconds until the hub has a message | median | largest |",
        "|---|---|---|",
        f"| of a member, alone | {median(calm):.3f} | {max(calm):.3f} |",
        f"| of a member, in the storm | {median(old):.3f} | {max(old):.3f} |",
        f"| of one that joins in the storm | {median(new):.3f} | {max(new):.3f} |",
        "",
        f"Messages taken that no member sent, or sent before: {meeting.num_foreign}. Members that "
        f"lost their connection: {num_lost}.",
        "",
    ]

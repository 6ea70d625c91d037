"""The connection between agents and their hub: who gets in, who does not, and what it costs."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import DEADLINE_S
from varuna_core.agent.meeting import link
from varuna_core.agent.meeting.link import (
    GREETING,
    Hub,
    Member,
    Place,
    call_hub,
    prove,
    publish_place,
    read_place,
)

SILENT_S = 60.0


class Pair:
    """A hub and its members, driven from one thread."""

    def __init__(self) -> None:
        self.hub = Hub("127.0.0.1", num_members=2, silent_s=SILENT_S)
        self.members: list[Member] = []
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.told: dict[Member, list[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.strangers: list[Stranger] = []
        self.ahead_s = 0.0
        """How much later than now it is."""

    def add(self, name: str, place: Callable[[], Place | None] | None = None) -> Member:
        found = place or (lambda: self.hub.place)
        member = Member(found, name, SILENT_S, self.complaints.append)
        self.members.append(member)
        self.told[member] = []
        return member

    def turn(self) -> None:
        now = time.monotonic() + self.ahead_s
        self.heard += self.hub.step(now)
        for member in self.members:
            self.told[member] += member.step(now)

    def turn_until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain for: {what}"
            self.turn()
        return found

    def connect(self, name: str) -> Member:
        member = self.add(name)
        self.turn_until(lambda: member.is_up and name in self.hub.names, f"{name} is up")
        return member

    def call(self) -> Stranger:
        self.strangers.append(Stranger(self))
        return self.strangers[-1]

    def end(self) -> None:
        for member in self.members:
            member.close()
        for stranger in self.strangers:
            stranger.sock.close()
        self.hub.close()


class Stranger:
    """Somebody who reached the port."""

    def __init__(self, pair: Pair) -> None:
        place = pair.hub.place
        self._pair = pair
        self.sock = socket.create_connection((place.address, place.port), timeout=DEADLINE_S)
        self.sock.setblocking(False)
        self.got = b""
        pair.turn_until(lambda: self.read().count(b"\n") == 1, "the challenge")
        greeting, self.challenge = self.got.decode().split()
        assert greeting == GREETING

    def read(self) -> bytes:
        try:
            while data := self.sock.recv(65536):
                self.got += data
            self.got += b"<end>"
        except (BlockingIOError, ConnectionError):
            pass
        return self.got

    def send(self, data: bytes) -> None:
        self.sock.setblocking(True)
        self.sock.sendall(data)
        self.sock.setblocking(False)

    def expect_nothing_but_the_end(self) -> None:
        self._pair.turn_until(lambda: self._has_ended(), "the hub hangs up")
        assert self.got.replace(b"<end>", b"").count(b"\n") == 1, "only the challenge"
        assert not self._pair.hub.names and not self._pair.heard

    def _has_ended(self) -> bool:
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        self.got += data
        return not data


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.end()


def test_a_member_hears_all_that_was_said_and_each_change(pair: Pair) -> None:
    pair.hub.say("stop", None)
    member = pair.connect("n1")
    pair.hub.say("stop", {"code": 1})
    pair.hub.say("stop", {"code": 1})
    pair.hub.say("signal", [10, "key"])
    member.send({"sign": 7})
    pair.turn_until(lambda: len(pair.told[member]) == 3 and pair.heard, "three words and a sign")
    assert [(line["topic"], line["value"]) for line in pair.told[member]] == [
        ("stop", None),
        ("stop", {"code": 1}),
        ("signal", [10, "key"]),
    ]
    assert pair.heard == [("n1", {"sign": 7})]


def test_a_wrong_secret_gets_nobody_in(pair: Pair) -> None:
    wrong = pair.hub.place._replace(secret=secrets.token_bytes(32))
    member = pair.add("n1", lambda: wrong)
    pair.turn_until(lambda: pair.complaints, "a complaint")
    assert not member.is_up and not pair.hub.names
    assert "files are used instead" in pair.complaints[0]


def test_a_hub_without_the_secret_is_not_believed(pair: Pair) -> None:
    """Somebody took the port of a hub that ended, and says yes to everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        place = Place("127.0.0.1", server.getsockname()[1], secrets.token_bytes(32))
        member = pair.add("n1", lambda: place)
        calls: list[socket.socket] = []

        def answer() -> bool:
            try:
                calls.append(server.accept()[0])
                calls[-1].sendall(f"{GREETING} {'0' * 64}\n{'1' * 64}\n".encode())
                calls[-1].sendall(b'{"topic": "stop", "value": {"code": 1}}\n')
            except BlockingIOError:
                pass
            return bool(pair.complaints)

        pair.turn_until(answer, "a complaint")
        for call in calls:
            call.close()
    assert "does not know the run's secret" in pair.complaints[0]
    assert not pair.told[member]


def test_what_a_member_sent_before_opens_nothing_again(pair: Pair) -> None:
    """Recorded on the way: the challenge is another one now."""
    place = pair.hub.place
    first = pair.call()
    proof = prove(place.secret, "member", first.challenge, "a" * 64, "n1")
    line = f"{'a' * 64} n1 {proof}\n".encode()
    first.send(line)
    pair.turn_until(lambda: pair.hub.names == ["n1"], "the true one is in")
    first.sock.close()
    pair.turn_until(lambda: not pair.hub.names, "it left")
    second = pair.call()
    assert second.challenge != first.challenge
    second.send(line)
    second.expect_nothing_but_the_end()


def test_the_hubs_own_proof_is_no_members_proof(pair: Pair) -> None:
    stranger = pair.call()
    proof = prove(pair.hub.place.secret, "hub", stranger.challenge, "a" * 64, "n1")
    stranger.send(f"{'a' * 64} n1 {proof}\n".encode())
    stranger.expect_nothing_but_the_end()


def test_a_line_put_into_a_connection_ends_it(pair: Pair) -> None:
    member = pair.connect("n1")
    wire = member._wire
    assert wire is not None
    wire.put(b"0" * 64 + b' {"sign": 8}\n')
    pair.turn_until(lambda: not pair.hub.names, "the hub hangs up")
    assert pair.heard == []


def test_a_line_played_again_ends_the_connection(pair: Pair) -> None:
    member = pair.connect("n1")
    assert member._outward is not None and member._wire is not None
    line = member._outward.close(b'{"sign": 8}')
    member._wire.put(line)
    member._wire.put(line)
    pair.turn_until(lambda: not pair.hub.names, "the hub hangs up")
    assert pair.heard == [("n1", {"sign": 8})]


GARBAGE = {
    "noise": bytes(range(1, 256)) + b"\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "json": b'{"topic": "stop"}\n',
    "pickle": b"\x80\x04\x95cposix\nsystem\n.\n",
    "no hex": b"z" * 64 + b" n1 " + b"0" * 64 + b"\n",
    "a path": b"0" * 64 + b" ../../x " + b"0" * 64 + b"\n",
    "empty": b"\n",
    "huge": b"a" * 1_000_000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_gets_nothing(pair: Pair, data: bytes) -> None:
    stranger = pair.call()
    with contextlib.suppress(OSError):  # it was hung up on in between
        stranger.send(data[:200_000])
    stranger.expect_nothing_but_the_end()


def test_a_line_without_an_end_is_cut_off(pair: Pair) -> None:
    stranger = pair.call()
    stranger.send(b"0" * (link.STRANGER_BYTES + 1))
    stranger.expect_nothing_but_the_end()


def test_silent_and_slow_strangers_are_hung_up_on(pair: Pair) -> None:
    silent, slow = pair.call(), pair.call()
    pair.ahead_s = link.HANDSHAKE_S - 1.0
    slow.send(b"0")
    pair.turn()
    assert pair.hub.num_pending == 2
    pair.ahead_s = link.HANDSHAKE_S + 1.0
    silent.expect_nothing_but_the_end()
    slow.expect_nothing_but_the_end()
    assert pair.hub.num_pending == 0


def test_many_strangers_keep_no_member_out(pair: Pair) -> None:
    most = 2 + link.SPARE_PENDING
    for _ in range(most + 20):
        pair.call()
        assert pair.hub.num_pending <= most
    pair.connect("n1")
    for stranger in pair.strangers:
        stranger.sock.close()
    pair.turn_until(lambda: pair.hub.num_pending == 0, "they are forgotten")
    assert pair.hub.names == ["n1"]


def test_who_knows_the_secret_and_sends_no_end_is_cut_off_too(pair: Pair) -> None:
    member = pair.connect("n1")
    assert member._wire is not None
    member._wire.put(b"x" * (link.LINE_BYTES + 2))
    pair.turn_until(lambda: not pair.hub.names, "the hub hangs up")


def test_a_silent_member_is_dropped_and_comes_back(pair: Pair) -> None:
    member = pair.connect("n1")
    pair.ahead_s = SILENT_S + 1.0
    pair.heard += pair.hub.step(time.monotonic() + pair.ahead_s)
    assert pair.hub.names == []
    pair.ahead_s += link.MOST_RETRY_S + 1.0
    pair.turn_until(lambda: not member.is_up, "it notices")
    pair.ahead_s += link.MOST_RETRY_S
    pair.turn_until(lambda: member.is_up and pair.hub.names == ["n1"], "it comes back")
    assert len(pair.complaints) == 1


def test_a_member_that_is_gone_is_told_from_one_that_is_silent(pair: Pair) -> None:
    pair.connect("n1")
    pair.heard += pair.hub.step(time.monotonic() + SILENT_S + 1.0)
    assert pair.hub.names == [] and pair.hub.take_hung_up() == []
    pair.turn_until(lambda: pair.hub.names == ["n1"], "it comes back")
    member = pair.members.pop()
    member.close()
    pair.turn_until(lambda: not pair.hub.names, "it is gone")
    assert pair.hub.take_hung_up() == ["n1"] and pair.hub.take_hung_up() == []


def test_a_silent_hub_is_given_up(pair: Pair) -> None:
    member = pair.connect("n1")
    now = time.monotonic()
    member.step(now + SILENT_S + 5.0)
    assert not member.is_up
    assert "sent nothing" in pair.complaints[0]


def test_a_hub_that_beats_is_not_given_up(pair: Pair) -> None:
    member = pair.connect("n1")
    for _ in range(10):
        pair.ahead_s += SILENT_S / 2
        before = len(pair.told[member])
        pair.hub.beat(time.monotonic() + pair.ahead_s)
        member.send({"sign": 1})
        pair.turn_until(lambda before=before: len(pair.told[member]) > before, "a beat")  # type: ignore[misc]
    assert member.is_up and not pair.complaints


def test_a_refused_connection_is_said_once(pair: Pair) -> None:
    dead = pair.hub.place
    pair.hub.close()
    member = Member(lambda: dead, "n1", SILENT_S, pair.complaints.append)
    now = time.monotonic()
    deadline = now + DEADLINE_S
    for _ in range(50):
        while not pair.complaints and time.monotonic() < deadline:
            member.step(now)
        now += link.MOST_RETRY_S
        member.step(now)
    member.close()
    assert len(pair.complaints) == 1
    assert f"127.0.0.1:{dead.port} (Connection refused): files" in pair.complaints[0]


def test_a_member_follows_a_hub_to_its_next_place(pair: Pair) -> None:
    places = [pair.hub.place]
    member = pair.add("n1", lambda: places[-1])
    pair.turn_until(lambda: member.is_up, "up")
    pair.hub.close()
    pair.hub = Hub("127.0.0.1", num_members=2, silent_s=SILENT_S)
    pair.hub.say("stop", {"code": 3})
    places.append(pair.hub.place)
    pair.turn_until(lambda: not member.is_up, "down")
    pair.ahead_s += 2 * link.MOST_RETRY_S
    said = {"topic": "stop", "value": {"code": 3}}
    pair.turn_until(lambda: said in pair.told[member], "what the next hub says")
    assert not pair.complaints, "the first one ended well"


def test_the_place_is_private_and_read_back(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    publish_place(path, pair.hub.place)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_place(path) == pair.hub.place
    path.write_text('{"address": "127.0.0.1", "port": 1, "secret": "00"}')
    assert read_place(path) is None
    assert read_place(tmp_path / "none") is None


def test_a_call_without_a_hub_is_answered_no(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    assert not call_hub(path)
    publish_place(path, pair.hub.place)
    pair.hub.close()
    assert not call_hub(path, 0.5)
    pair.hub = Hub("127.0.0.1", num_members=2, silent_s=SILENT_S)

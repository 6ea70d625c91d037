"""Connect each agent of a run to a hub, which receives signs of life and sends stops and orders.

    hub                                   member
     │  vjob-link/1 <challenge>       ──►   │
     │  ◄──  <challenge> <name> <proof>     │   HMAC of both challenges and the name, with the
     │  <proof>                       ──►   │   secret of link.json; nothing else is read before
     │  {"topic": ..., "value": ...}  ──►   │   all that was said so far, then each change
     │  {"beat": n}                   ──►   │   as long as the hub sees the run's folder
     │  ◄──  a sign of life, {"look": true} │   the latter: something new lies in the folder,
     │  {"looked": true}              ──►   │   and the hub has seen it

Files stay the record: the hub sends only what it has read in the run's folder, and an agent without
a connection reads the files itself. Each line after the proofs carries an HMAC of its number and
content under a key of this connection, so that lines cannot be inserted, dropped or replayed.
Nothing is encrypted. A client that proves nothing holds a socket for some seconds and gets only a
challenge.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import random
import re
import resource
import secrets
import select
import selectors
import socket
import struct
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from varuna_core.records.files import read_json, write_json

GREETING = "vjob-link/1"
HANDSHAKE_S = 5.0
STRANGER_BYTES = 300
"""Bytes of the longest line that is accepted from an unauthenticated client."""
LINE_BYTES = 64 * 1024
WORD_BYTES = 16 * 1024 * 1024
"""Bytes of the longest line that is accepted from a hub, whose orders name all nodes."""
UNREAD_BYTES = 2 * WORD_BYTES
"""Unsent bytes beyond which the connection to a member that does not read is closed."""
SPARE_PENDING = 64
"""Unauthenticated connections beyond one for each member; the oldest is closed first."""
SPARE_DESCRIPTORS = 512
DEAF_S = 2.0
"""Seconds without accepting connections after the file descriptors have run out."""
FIRST_RETRY_S, MOST_RETRY_S = 0.25, 15.0
SILENT_PART = 3.0
"""Divisor of the silence after which a node counts as lost: a connection is closed after that
part of it, which leaves the rest of the time for files."""
LEAST_SILENT_S = 0.5
BEATS_PER_SILENCE = 3.0
CHECKS_PER_SILENCE = 20.0
"""Number of checks of all connections in the time after which a silent connection is closed,
however many messages come."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEX = re.compile(r"[0-9a-f]{64}")


class Broken(Exception):
    """Raised if the connection ended or the other end violated the protocol."""


class HungUp(Broken):
    """Raised if the other end closed the connection: its process has ended, or closed it itself."""


class Place(NamedTuple):
    """Content of link.json: the address at which the hub listens, and the shared secret."""

    address: str
    port: int
    secret: bytes


def publish_place(path: Path, place: Place) -> None:
    value = {"address": place.address, "port": place.port, "secret": place.secret.hex()}
    write_json(path, value)  # 0600, in a folder of 0700


def read_place(path: Path) -> Optional[Place]:
    """Read link.json; return None if no hub has published a valid one."""
    value = read_json(path)
    try:
        place = Place(str(value["address"]), int(value["port"]), bytes.fromhex(value["secret"]))
    except (KeyError, TypeError, ValueError):
        return None
    return place if len(place.secret) == 32 and 0 < place.port < 65536 else None


def compute_silence_s(lost_s: float) -> float:
    """Compute how long a connection may be silent."""
    return max(lost_s / SILENT_PART, LEAST_SILENT_S)


def raise_descriptor_limit(num_members: int) -> None:
    """Raise this process's limit of open files to one for each member and a reserve.

    Ranks that have already been started keep their own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_members + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def prove(secret: bytes, who: str, hub: str, member: str, name: str) -> str:
    """Compute the HMAC by which `who` (hub or member) proves that it knows the secret."""
    text = " ".join((GREETING, who, hub, member, name))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


class Wire:
    """Line-based reader and writer over a non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.most = STRANGER_BYTES
        """Bytes of the longest line that is accepted."""
        self._inward, self._outward = bytearray(), bytearray()
        self._has_ended = False

    @property
    def is_waiting(self) -> bool:
        """True while something is still to be sent."""
        return bool(self._outward)

    def take(self) -> Optional[bytes]:
        """Return the next line without its line end; None if it has not arrived yet."""
        while True:
            end = self._inward.find(b"\n")
            if end >= 0:
                line = bytes(self._inward[:end])
                del self._inward[: end + 1]
                return line
            if len(self._inward) > self.most:
                raise Broken(f"the other side sent a line of more than {self.most} bytes")
            if self._has_ended:
                raise HungUp("the other side has closed the connection")
            if not self._fill():
                return None

    def _fill(self) -> bool:
        try:
            data = self.sock.recv(min(65536, self.most + 1 - len(self._inward)))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise _explain(error) from None
        self._inward += data
        self._has_ended = not data
        return True

    def put(self, line: bytes) -> None:
        self._outward += line
        if len(self._outward) > UNREAD_BYTES:
            raise Broken("the other side does not read")
        self.flush()

    def flush(self) -> None:
        try:
            while self._outward:
                sent = self.sock.send(self._outward[: 256 * 1024])
                del self._outward[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise _explain(error) from None


def _explain(error: OSError) -> Broken:
    kind = HungUp if isinstance(error, (BrokenPipeError, ConnectionResetError)) else Broken
    return kind(error.strerror or str(error))


class Seal:
    """Signer and verifier of the JSON lines of one direction: each line carries its own HMAC."""

    def __init__(self, secret: bytes, way: str, hub: str, member: str, name: str) -> None:
        key = prove(secret, f"lines of the {way}", hub, member, name)
        self._key, self._count = bytes.fromhex(key), 0

    def close(self, data: bytes) -> bytes:
        return self._mark(data) + b" " + data + b"\n"

    def open(self, line: bytes) -> Dict[str, Any]:
        mark, _, data = line.partition(b" ")
        if not hmac.compare_digest(mark, self._mark(data)):
            raise Broken("a line has a wrong signature, so the other side did not send it")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise Broken("a line that is not JSON") from None
        if not isinstance(value, dict):
            raise Broken("a line that is not an object")
        return value

    def _mark(self, data: bytes) -> bytes:
        number, self._count = struct.pack(">Q", self._count), self._count + 1
        return hmac.new(self._key, number + data, hashlib.sha256).hexdigest().encode()


def _encode(value: Dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


class _Guest:
    """A connection at the hub; it has no name until the client is authenticated."""

    def __init__(self, wire: Wire, challenge: str, now: float) -> None:
        self.wire, self.challenge = wire, challenge
        self.since = self.heard = now
        self.name = ""
        self.inward: Optional[Seal] = None
        self.outward: Optional[Seal] = None


class Hub:
    """The server end of the agents' connections. `step` does the pending work without blocking;
    poll `fileno` to know when."""

    def __init__(self, address: str, *, num_members: int, silent_s: float) -> None:
        """Listen on this address, on a port that the kernel chooses."""
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(min(4096, num_members + 128))
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        port = int(self._listener.getsockname()[1])
        self.place = Place(address, port, secrets.token_bytes(32))
        self._most_pending = num_members + SPARE_PENDING
        self._silent_s = silent_s
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._deaf_until: Optional[float] = None
        self._pending: Dict[int, _Guest] = {}
        """Unauthenticated connections by file descriptor, the oldest first."""
        self._members: Dict[str, _Guest] = {}
        self._hung_up: List[str] = []
        self._word: Dict[str, Any] = {}
        self._count = 0
        self._next_beat = self._next_check = 0.0
        self._changed: Set[str] = set()

    def fileno(self) -> int:
        """Return a file descriptor that is ready to read when `step` has something to do."""
        return self._selector.fileno()

    @property
    def names(self) -> List[str]:
        """Names of the members that are connected now."""
        return list(self._members)

    def has(self, name: str) -> bool:
        return name in self._members

    def take_changed(self) -> Set[str]:
        """Return the members that have come or gone since the last call."""
        names, self._changed = self._changed, set()
        return names

    def take_hung_up(self) -> List[str]:
        """Return the members that have closed their connections since the last call."""
        names, self._hung_up = self._hung_up, []
        return names

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def step(self, now: float) -> List[Tuple[str, Dict[str, Any]]]:
        """Accept, read and send; return the members' messages, each with the member's name."""
        said: List[Tuple[str, Dict[str, Any]]] = []
        if self._deaf_until is not None and now >= self._deaf_until:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept(now)
            else:
                self._serve(key.data, now, said)
        if now >= self._next_check:
            self._next_check = now + min(self._silent_s, HANDSHAKE_S) / CHECKS_PER_SILENCE
            self._drop_silent(now)
        return said

    def _drop_silent(self, now: float) -> None:
        for guest in [*self._pending.values(), *self._members.values()]:
            limit_s = self._silent_s if guest.name else HANDSHAKE_S
            if now - guest.heard > limit_s:
                self._drop(guest)

    def say(self, topic: str, value: Any) -> None:
        """Send a topic's value, if it has changed, to all present and later members."""
        if topic in self._word and self._word[topic] == value:
            return
        self._word[topic] = value
        self._send_all({"topic": topic, "value": value})

    def answer(self, name: str, value: Dict[str, Any]) -> None:
        """Send a message to one member if the member is still connected."""
        if name in self._members:
            self._send(self._members[name], _encode(value))

    def beat(self, now: float) -> None:
        """Send a sign of life to all members if it is due. Call this in each round, provided that
        the run's folder could be read recently."""
        if now < self._next_beat:
            return
        self._next_beat = now + self._silent_s / BEATS_PER_SILENCE
        self._count += 1
        self._send_all({"beat": self._count})

    def close(self) -> None:
        """Say goodbye to the members, so that they report no failure, and close all connections."""
        self._send_all({"bye": True})
        for guest in [*self._pending.values(), *self._members.values()]:
            self._drop(guest)
        self._selector.close()
        self._listener.close()

    def _accept(self, now: float) -> None:
        for _ in range(64):
            try:
                sock, _address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._selector.unregister(self._listener)
                    self._deaf_until = now + DEAF_S
                return
            guest = _Guest(Wire(sock), secrets.token_hex(32), now)
            self._pending[sock.fileno()] = guest
            self._selector.register(sock, selectors.EVENT_READ, guest)
            if len(self._pending) > self._most_pending:
                self._drop(next(iter(self._pending.values())))
            with self._dropping(guest):
                guest.wire.put(f"{GREETING} {guest.challenge}\n".encode())

    def _serve(self, guest: _Guest, now: float, said: List[Tuple[str, Dict[str, Any]]]) -> None:
        if guest.wire.sock.fileno() < 0:
            return  # dropped in this very round
        with self._dropping(guest):
            guest.wire.flush()
            while (line := guest.wire.take()) is not None:
                if guest.inward is None:
                    self._admit(guest, line)
                else:
                    said.append((guest.name, guest.inward.open(line)))
                guest.heard = now
            self._await(guest)

    def _admit(self, guest: _Guest, line: bytes) -> None:
        words = line.decode("ascii", "replace").split(" ")
        if len(words) != 3 or not _HEX.fullmatch(words[0]) or not _NAME.fullmatch(words[1]):
            raise Broken("no proof")
        theirs, name, proof = words
        terms = (guest.challenge, theirs, name)
        expected = prove(self.place.secret, "member", *terms)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            raise Broken("a wrong proof")
        self._pending.pop(guest.wire.sock.fileno(), None)
        if name in self._members:  # its earlier connection is dead and does not know it yet
            self._drop(self._members[name])
        guest.name, self._members[name] = name, guest
        self._changed.add(name)
        guest.wire.most = LINE_BYTES
        guest.inward = Seal(self.place.secret, "member", *terms)
        guest.outward = Seal(self.place.secret, "hub", *terms)
        guest.wire.put(prove(self.place.secret, "hub", *terms).encode() + b"\n")
        for topic, value in self._word.items():
            guest.wire.put(guest.outward.close(_encode({"topic": topic, "value": value})))

    def _send_all(self, value: Dict[str, Any]) -> None:
        data = _encode(value)
        for guest in list(self._members.values()):
            self._send(guest, data)

    def _send(self, guest: _Guest, data: bytes) -> None:
        assert guest.outward is not None
        with self._dropping(guest):
            guest.wire.put(guest.outward.close(data))
            self._await(guest)

    def _await(self, guest: _Guest) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.wire.is_waiting else 0)
        self._selector.modify(guest.wire.sock, events, guest)

    @contextlib.contextmanager
    def _dropping(self, guest: _Guest) -> Any:
        try:
            yield
        except Broken as problem:
            if isinstance(problem, HungUp) and self._members.get(guest.name) is guest:
                self._hung_up.append(guest.name)
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        sock = guest.wire.sock
        if sock.fileno() < 0:
            return
        self._pending.pop(sock.fileno(), None)
        if self._members.get(guest.name) is guest:
            del self._members[guest.name]
            self._changed.add(guest.name)
        self._selector.unregister(sock)
        sock.close()


class Member:
    """The client end, which reconnects by itself with exponential backoff."""

    def __init__(
        self,
        find_place: Callable[[], Optional[Place]],
        name: str,
        silent_s: float,
        complain: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`complain` is called once, with a message, if the connection fails."""
        self._find_place, self._name, self._silent_s = find_place, name, silent_s
        self._complain: Optional[Callable[[str], object]] = complain
        self._selector = selectors.EpollSelector()
        self._wire: Optional[Wire] = None
        self._place: Optional[Place] = None
        self._challenge = ""
        self._theirs = ""
        self._is_dismissed = False
        """True once the hub has said goodbye."""
        self._inward: Optional[Seal] = None
        self._outward: Optional[Seal] = None
        self._begun = self._heard = 0.0
        self._retry_at = 0.0
        self._pause_s = FIRST_RETRY_S

    def fileno(self) -> int:
        """Return a file descriptor that is ready to read when `step` has something to do."""
        return self._selector.fileno()

    @property
    def is_up(self) -> bool:
        return self._inward is not None

    @property
    def place(self) -> Optional[Place]:
        """Place of the hub that the member is connected to, or tried last."""
        return self._place

    def step(self, now: float) -> List[Dict[str, Any]]:
        """Connect, read and send; return the hub's messages."""
        said: List[Dict[str, Any]] = []
        try:
            if self._wire is None:
                if now >= self._retry_at:
                    self._call(now)
                return said
            if self._selector.select(0):
                self._serve(self._wire, now, said)
            limit_s = self._silent_s if self.is_up else HANDSHAKE_S
            if now - (self._heard if self.is_up else self._begun) > limit_s:
                raise Broken(f"the hub sent nothing for {limit_s:g} s")
        except Broken as problem:
            self._lose(str(problem), now)
        return said

    def send(self, value: Dict[str, Any]) -> None:
        """Send a message; without a connection, drop it, since the files say the same."""
        if self._wire is None or self._outward is None:
            return
        try:
            self._wire.put(self._outward.close(_encode(value)))
            self._await(self._wire)
        except Broken as problem:
            self._lose(str(problem), time.monotonic())

    def wait(self, seconds: float) -> None:
        """Return when `step` has something to do, or after `seconds`."""
        select.select([self.fileno()], [], [], max(seconds, 0))

    def close(self) -> None:
        if self._wire is not None:
            # With unread bytes the kernel would take back what was sent last.
            with contextlib.suppress(OSError):
                while self._wire.sock.recv(65536):
                    pass
            self._hang_up(self._wire)
        self._selector.close()

    def _call(self, now: float) -> None:
        self._is_dismissed = False
        self._place = self._find_place()
        self._pause_s = min(2 * self._pause_s, MOST_RETRY_S)
        self._retry_at = now + self._pause_s * random.uniform(0.5, 1.0)
        if self._place is None:
            return
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._wire, self._begun = Wire(sock), now
        self._wire.most = WORD_BYTES
        try:
            code = sock.connect_ex((self._place.address, self._place.port))
        except OSError as error:  # no address at all
            raise Broken(str(error)) from None
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        if code not in (0, errno.EINPROGRESS):
            raise Broken(os.strerror(code))

    def _serve(self, wire: Wire, now: float, said: List[Dict[str, Any]]) -> None:
        if code := wire.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise Broken(os.strerror(code))
        wire.flush()
        while (line := wire.take()) is not None:
            if self._inward is not None:
                said.append(self._inward.open(line))
                self._is_dismissed = "bye" in said[-1]
            elif not self._challenge:
                self._answer(wire, line)
            else:
                self._trust(line)
            self._heard = now
        self._await(wire)

    def _answer(self, wire: Wire, line: bytes) -> None:
        greeting, _, challenge = line.decode("ascii", "replace").partition(" ")
        if greeting != GREETING or not _HEX.fullmatch(challenge):
            raise Broken("no hub of this version listens at that address")
        assert self._place is not None
        self._theirs, self._challenge = challenge, secrets.token_hex(32)
        proof = prove(self._place.secret, "member", challenge, self._challenge, self._name)
        wire.put(f"{self._challenge} {self._name} {proof}\n".encode())

    def _trust(self, line: bytes) -> None:
        assert self._place is not None
        secret, terms = self._place.secret, (self._theirs, self._challenge, self._name)
        if not hmac.compare_digest(line, prove(secret, "hub", *terms).encode()):
            raise Broken("the process that listens there does not know the run's secret")
        self._inward = Seal(secret, "hub", *terms)
        self._outward = Seal(secret, "member", *terms)
        self._pause_s = FIRST_RETRY_S

    def _await(self, wire: Wire) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.is_waiting else 0)
        self._selector.modify(wire.sock, events)

    def _lose(self, why: str, now: float) -> None:
        if self._wire is not None:
            self._hang_up(self._wire)
        self._retry_at = max(self._retry_at, now + self._pause_s * random.uniform(0.5, 1.0))
        if self._complain is not None and self._place is not None and not self._is_dismissed:
            where = f"{self._place.address}:{self._place.port}"
            self._complain(f"no connection to the hub at {where} ({why}): files are used instead")
            self._complain = None

    def _hang_up(self, wire: Wire) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(wire.sock)
        wire.sock.close()
        self._wire = self._inward = self._outward = None
        self._challenge = ""


def call_hub(path: Path, timeout_s: float = 2.0) -> bool:
    """Ask the hub of this link.json to read the run's files now; return True if it confirms.

    This is for processes that have written a request and are not members. If the hub does not
    answer, it finds the file by itself some seconds later.
    """
    place = read_place(path)
    if place is None:
        return False
    member = Member(lambda: place, f"caller-{secrets.token_hex(8)}", timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        has_asked = False
        while (now := time.monotonic()) < deadline:
            said = member.step(now)
            if has_asked and any("looked" in line for line in said):
                return True
            if member.is_up and not has_asked:
                member.send({"look": True})
                has_asked = True
            member.wait(min(0.1, deadline - now))
    except OSError:
        pass
    finally:
        member.close()
    return False

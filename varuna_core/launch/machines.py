"""Parse the list of machines, and decide which machines of a changing list get an agent. Only
`read_machine_list` reads a file.

The list has one host per line, by the name that ssh uses:

    10.0.0.4                  ssh's own config says the rest
    ann@gpu-46:2222           user and port
    [fe80::1]:22              an IPv6 address with a port; brackets are optional without one
    127.0.0.1                 this machine, without ssh; so do localhost and ::1

States of a machine in a list that is watched for changes:

             listed, a seat is free            it is fit                 no longer listed
    unknown ────────────────► AWAY ─► LOOKING ───────────► HERE ──────────────► HERE, asked to leave
       ▲                       ▲         │ not fit           │ agent lost          │
       │ no longer listed      └─────────┴───────────────────┴── later again       │ has left
       └───────────────────────────────────────────────────────────────────────────┘

A machine that the manager dismissed (unfit, excluded, `vjob shrink`) stays AWAY until it has been
removed from the list. A machine keeps its seat until its agent has ended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.launch.errors import InputError

LOCAL = ("127.0.0.1", "localhost", "::1")
# Neither a shell nor ssh's option reader may see anything in these but a name.
_HOST = re.compile(r"[A-Za-z0-9_.]([A-Za-z0-9_.-]*)")
_IPV6 = re.compile(r"(?=[^%:]*:)[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_.+@][A-Za-z0-9_.+@-]*")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A line of the machine list."""

    host: str
    user: str | None = None
    port: int | None = None

    @property
    def is_local(self) -> bool:
        """True for this machine without ssh; an entry with a user or a port always uses ssh."""
        return self.host in LOCAL and self.user is None and self.port is None

    def __str__(self) -> str:
        """Return the machine as spelled in the list."""
        user = f"{self.user}@" if self.user is not None else ""
        if self.port is None:
            return user + self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}{host}:{self.port}"


def parse_machine_list(text: str, name: str) -> tuple[Machine, ...]:
    """Parse a machine list; raise InputError with up to ten of its faulty lines. `name` is the
    list's file name."""
    found: dict[Machine, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        machine = parse_machine(word)
        if isinstance(machine, str):
            problems.append(f"{name}:{number}: {word!r}: {machine}")
        elif machine in found:
            problems.append(f"{name}:{number}: {word} is on line {found[machine]} already")
        else:
            found[machine] = number
    if problems:
        raise InputError("\n  ".join(problems[:10]))
    if not found:
        raise InputError(f"{name} lists no machine: write a host per line, 127.0.0.1 for this one")
    return tuple(found)


def read_machine_list(path: Path) -> tuple[Machine, ...]:
    """Read the machine list in a file: the hosts on which a run without a scheduler starts agents.

    Raise InputError if the file cannot be read, or with up to ten of its faulty lines.
    """
    try:
        return parse_machine_list(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        advice = "write one host per line into it, 127.0.0.1 for this machine"
        raise InputError(f"{path}: {error.strerror}; {advice}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: this is not text in UTF-8") from None


def parse_machine(word: str) -> Machine | str:
    """Return the machine, or a text that says what is wrong with the word."""
    user, at, place = word.rpartition("@")
    host, port = _split_port(place)
    if at and not _USER.fullmatch(user):
        return "the text before @ is not a user name"
    if not (_HOST.fullmatch(host) or _IPV6.fullmatch(host)):
        return "expected HOST, USER@HOST or USER@HOST:PORT"
    if port is None:
        return Machine(host=host, user=user or None)
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        return f"port {port!r} is not a number from 1 to 65535"
    return Machine(host=host, user=user or None, port=int(port))


def _split_port(place: str) -> tuple[str, str | None]:
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", place)
    if bracketed:
        return bracketed[1], bracketed[2]
    if place.count(":") == 1:
        host, _, port = place.partition(":")
        return host, port
    return place, None


def name_machines(machines: Sequence[Machine], own: str) -> tuple[str, ...]:
    """Return short, unique names of machines for files and logs; `own` is this host's name."""
    found: list[str] = []
    for machine in machines:
        found.append(name_machine(machine, own, found))
    return tuple(found)


def name_machine(machine: Machine, own: str, taken: Sequence[str]) -> str:
    """Return a name for a machine that differs from the names in `taken`."""
    host = own if machine.is_local else machine.host
    # A name loses its domain; of an address every part counts.
    short = host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", short).strip("-") or "node"
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


AWAY, LOOKING, HERE = "away", "looking", "here"
RETRY_S = 15.0
"""Seconds to the next try on a machine that failed, doubled after each try up to a maximum."""
MOST_RETRY_S = 600.0
LIVED_S = 300.0
"""Seconds after which an agent's end does not count as a failure to start."""


@dataclass(frozen=True)
class Listing:
    """State of the machine list: the last usable version, and the text read last."""

    machines: tuple[Machine, ...] = ()
    """Machines of the last usable list."""
    counted: str | None = None
    """Text of the last usable list."""
    seen: str | None = None
    """Text at the last look, which may not be written completely."""
    trouble: str = ""
    """The last problem reported about the file."""


@dataclass(frozen=True)
class Host:
    """A machine of the list, and its seat: the index of its node in the run."""

    machine: Machine
    name: str
    """Name in tables and file names."""
    seat: int
    phase: str = AWAY
    tries: int = 0
    """Failed tries in a row."""
    again_at: float = 0.0
    since: float = 0.0
    """When the machine's agent was started."""
    is_asked: bool = False
    """True while the agent is asked to leave."""
    was_asked: bool = False
    """True if this agent was ever asked to leave."""
    is_sent_home: bool = False


@dataclass(frozen=True)
class Move:
    """A step to take for a machine: probe it, cancel the probe, ask its agent to leave, or withdraw
    that request."""

    kind: str
    host: Host


LOOK, DROP, ASK, TAKE_BACK = "look", "drop", "ask", "take-back"


def read_listing(listing: Listing, text: str | None, error: str, name: str) -> tuple[Listing, str]:
    """Return the listing after reading the file's text, and a message for the log.

    A new text is used only once two reads in a row return the same text, since a file may be half
    written; until then the previous list is used. `error` says why there is no text.
    """
    trouble, last = "", "the last list is used" if listing.counted is not None else "nobody starts"
    if text is None:
        trouble = f"{error}; {last} until the file can be read"
    elif text != listing.counted:
        if text != listing.seen:
            return replace(listing, seen=text), ""
        try:
            machines = parse_machine_list(text, name)
            listing = replace(listing, machines=machines, counted=text)
        except InputError as problem:
            trouble = f"{problem}; {last} until that is fixed"
    notice = "" if trouble == listing.trouble else trouble or f"{name} can be used again"
    return replace(listing, seen=text, trouble=trouble), notice


def decide(
    hosts: Sequence[Host], listed: Sequence[Machine], now: float, *, seats: int, own: str
) -> tuple[tuple[Host, ...], list[Move]]:
    """Compare the run's machines with the machine list. Return the machines that keep or get a
    seat, and the moves that carry this out (probe a machine, ask its agent to leave), in order.

    `hosts` are the machines so far, `listed` those of the list. A seat is the index of a node in
    the run, and `seats` is how many there are. `now` is the time; `own` is this machine's name.
    """
    kept: list[Host] = []
    moves: list[Move] = []
    for host in hosts:
        if host.machine in listed:
            if host.is_asked:
                host = replace(host, is_asked=False)
                moves.append(Move(TAKE_BACK, host))
        elif host.phase == AWAY:
            continue
        elif host.phase == LOOKING:
            moves.append(Move(DROP, host))
            continue
        elif not host.is_asked:
            host = replace(host, is_asked=True, was_asked=True)
            moves.append(Move(ASK, host))
        kept.append(host)
    for machine in listed:
        taken = {host.seat for host in kept}
        free = [seat for seat in range(seats) if seat not in taken]
        if free and all(host.machine != machine for host in kept):
            name = name_machine(machine, own, [host.name for host in kept])
            kept.append(Host(machine, name, free[0]))
    found = []
    for host in kept:
        if host.phase == AWAY and not host.is_sent_home and now >= host.again_at:
            host = replace(host, phase=LOOKING)
            moves.append(Move(LOOK, host))
        found.append(host)
    return tuple(found), moves


def find_waiting(hosts: Sequence[Host], listed: Sequence[Machine]) -> list[Machine]:
    """Return listed machines for which there is no seat."""
    seated = {host.machine for host in hosts}
    return [machine for machine in listed if machine not in seated]


def note_start(host: Host, now: float) -> Host:
    """Return the host's new state, after its probe succeeded and its agent was started."""
    return replace(host, phase=HERE, since=now, was_asked=False, is_asked=False)


def note_failure(host: Host, now: float) -> Host:
    """Return the host's new state, after its probe failed or its agent was lost."""
    wait_s = min(RETRY_S * 2.0**host.tries, MOST_RETRY_S)
    return replace(host, phase=AWAY, tries=host.tries + 1, again_at=now + wait_s, is_asked=False)


def note_end(host: Host, code: int, now: float) -> Host:
    """Return the host's new state after its agent ended; code 0 if the manager dismissed it."""
    if code != 0:
        lived = now - host.since >= LIVED_S
        return note_failure(replace(host, tries=0) if lived else host, now)
    return replace(
        host, phase=AWAY, tries=0, again_at=now, is_asked=False, is_sent_home=not host.was_asked
    )

"""The list of machines: a host a line, as ssh knows it. Pure.

10.0.0.4                  ssh's own config says the rest
ann@gpu-46:2222           user and port
[fe80::1]:22              an IPv6 address with a port; without one the brackets may go
127.0.0.1                 this machine, without ssh; so do localhost and ::1
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from varuna_core.launch.errors import InputError

LOCAL = ("127.0.0.1", "localhost", "::1")
# Neither a shell nor ssh's option reader may see anything in these but a name.
_HOST = re.compile(r"[A-Za-z0-9_.]([A-Za-z0-9_.-]*)")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_.+@][A-Za-z0-9_.+@-]*")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One line of the list."""

    host: str
    user: str | None = None
    port: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, reached without ssh; with a user or a port ssh is meant."""
        return self.host in LOCAL and self.user is None and self.port is None

    def __str__(self) -> str:
        """As the list spells it."""
        user = f"{self.user}@" if self.user is not None else ""
        if self.port is None:
            return user + self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}{host}:{self.port}"


def parse_machine_list(text: str, name: str) -> tuple[Machine, ...]:
    """The machines of a list; `name` is the file's, for messages. Every problem at once."""
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
        raise InputError(f"{name}: no machine in it: write a host a line, 127.0.0.1 for this one")
    return tuple(found)


def parse_machine(word: str) -> Machine | str:
    """The machine, or what is wrong with the word."""
    user, at, place = word.rpartition("@")
    host, port = _split_port(place)
    if at and not _USER.fullmatch(user):
        return "the user before @ is no user name"
    if not (_HOST.fullmatch(host) or _IPV6.fullmatch(host)):
        return "want HOST, USER@HOST or USER@HOST:PORT"
    if port is None:
        return Machine(host=host, user=user or None)
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
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
    """What files and log lines call them: short, and each its own; `own` is this host's name."""
    found: list[str] = []
    for machine in machines:
        found.append(name_machine(machine, own, found))
    return tuple(found)


def name_machine(machine: Machine, own: str, taken: Sequence[str]) -> str:
    """What one of them is called where these names are taken."""
    host = own if machine.is_local else machine.host
    # A name loses its domain; of an address every part counts.
    short = host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", short).strip("-") or "node"
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free

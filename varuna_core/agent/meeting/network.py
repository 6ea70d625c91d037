"""Addresses, interfaces and ports of this host, as other hosts see them.

The command `ip` is tried first, since it knows secondary addresses; without it, the kernel is asked
through sockets. Nothing here sends a packet: connecting a UDP socket only looks up the route.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import struct
import time
from typing import Iterator, NamedTuple

from varuna_core.agent.processes.process import run

FIRST_PORT = 61000
"""First port to try for the master: above Linux's default ephemeral range, which ends at 60999."""
NUM_PORTS = 4500
NUM_PORT_TESTS = 3
PORT_TEST_PAUSE_S = 0.1
ANYWHERE = "198.51.100.1"
"""An address that is reserved for documentation, so that the route to it is the default route."""

_SIOCGIFADDR = 0x8915
_VIRTUAL = re.compile(r"lo|docker|virbr|veth|br-|cni|flannel|podman|tun|tap")


class Route(NamedTuple):
    """The way from this host to an address."""

    interface: str
    source: str
    """This host's own address, as the other side sees it."""


def list_addresses() -> dict[str, str]:
    """Return this host's IPv4 addresses, each with its interface."""
    text = _ask_ip("-o", "-4", "addr")
    return parse_addresses(text) if text else dict(_addresses_by_socket())


def parse_addresses(text: str) -> dict[str, str]:
    """Parse the output of `ip -o -4 addr`: `2: eth0@if3    inet 10.0.0.1/24 brd ...`."""
    rows = (line.split() for line in text.splitlines())
    found = [row for row in rows if len(row) > 3 and row[0].endswith(":") and row[2] == "inet"]
    return {row[3].partition("/")[0]: re.split("[@:]", row[1])[0] for row in found}


def find_route(address: str) -> Route | None:
    """Return the route to an address, for an own address its interface; None without a route."""
    own = list_addresses()
    if address in own or address.startswith("127."):
        return Route(own.get(address, "lo"), address)
    route = parse_route(_ask_ip("-o", "route", "get", address))
    if route is None:
        source = _source_towards(address)
        route = Route(own[source], source) if source in own else None
    return route


def parse_route(text: str) -> Route | None:
    """Parse the output of `ip -o route get ADDRESS`."""
    interface = re.search(r"\bdev (\S+)", text)
    source = re.search(r"\bsrc (\S+)", text)
    return Route(interface.group(1), source.group(1)) if interface and source else None


def resolve(name: str) -> list[str]:
    """Return the IPv4 addresses of a host name; none if the name does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(item[4][0]) for item in found})


def find_outside_address(towards: list[str]) -> str | None:
    """Return this host's address on the cluster's network: that of the route to one of `towards`,
    else of the default route, else of the only real interface; None if there is none."""
    for address in [*towards, ANYWHERE]:
        route = find_route(address)
        if route is not None and not route.source.startswith("127."):
            return route.source
    real = [addr for addr, name in list_addresses().items() if not _VIRTUAL.match(name)]
    return real[0] if len(real) == 1 else None


def list_interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def is_port_free(port: int, *, heeds_names: bool = True) -> bool:
    """Return True if the port is free and no other run on this host has reserved it."""
    holder = hold_port(port, heeds_names=heeds_names)
    if holder is not None:
        holder.close()
    return holder is not None


def hold_port(port: int, *, heeds_names: bool = True) -> socket.socket | None:
    """Reserve a free port against other runs on this host until the returned socket is closed.

    Return None if the port is taken. Seconds pass before rank 0 listens, and other runs may test
    the same port meanwhile. The socket reserves a name, not the port, so that any program can
    listen on the port. Any local user can take such names: without `heeds_names`, names that other
    users hold are ignored, and only a test if one can listen on the port decides.

    A failed test is repeated, since a command that another thread starts holds copies of the
    testing sockets between its fork and its exec.
    """
    for again in range(NUM_PORT_TESTS):
        if again:
            time.sleep(PORT_TEST_PAUSE_S)
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holder.bind(_name_port(port))
            holder.listen(socket.SOMAXCONN)  # for others to see whose it is
        except OSError:
            if heeds_names or _is_held_by_us(port):
                holder.close()
                continue
        if _can_listen(port):
            return holder
        holder.close()
    return None


def _name_port(port: int) -> str:
    """Return the abstract socket name of a port, which vanishes with its holder."""
    return f"\0vjob-port-{port}"


def _is_held_by_us(port: int) -> bool:
    """Return True if a process of this user holds the port's name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as test:
        test.setblocking(False)
        try:
            test.connect(_name_port(port))
            facts = test.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return False
    return bool(struct.unpack("3i", facts)[1] == os.geteuid())


def _can_listen(port: int) -> bool:
    """Tell whether this process can listen on the port on all addresses, as torch does."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as test:
        # As torch's store sets it: TIME_WAIT of an earlier attempt is no reason to refuse.
        test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            test.bind(("", port))
            test.listen(1)
        except OSError:
            return False
    return True


def list_ports(job_number: int, attempt: int) -> Iterator[int]:
    """Return the ports to try, in order; each job and attempt starts elsewhere in the range."""
    start = (job_number * 7 + attempt) % NUM_PORTS
    return (FIRST_PORT + (start + step) % NUM_PORTS for step in range(NUM_PORTS))


def is_own_address(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as test:
        try:
            test.bind((address, 0))
        except OSError:
            return False
    return True


def _ask_ip(*words: str) -> str:
    program = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
    return run([program, *words], timeout_s=5).out if program else ""


def _source_towards(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as test:
        try:
            test.connect((address, 9))
            return str(test.getsockname()[0])
        except OSError:
            return None


def _addresses_by_socket() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for name in list_interfaces():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(handle.fileno(), _SIOCGIFADDR, request)
                yield socket.inet_ntoa(answer[20:24]), name

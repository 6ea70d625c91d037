"""TCP sockets of a process, and how much they received: /proc and the kernel's sock_diag(7)."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from pathlib import Path
from typing import Dict, Iterator

LIMIT_S = 1.0
SOCK_DIAG, BY_FAMILY, DUMP, DONE = 4, 20, 0x301, 3
INFO = 2
"""The kernel's number of the attribute with a struct tcp_info, in requests and in answers."""
STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
"""Bit mask of the TCP states in which a connection may receive data or may hold received data that
was not read yet."""
HEAD = struct.Struct("=IHHII")
PORTS, INODE, BODY, RECEIVED = 4, 68, 72, 128
"""Offsets of the ports and the inode in struct inet_diag_msg, the size of that struct, and the
offset of the received bytes in struct tcp_info."""


def list_inodes(pid: int) -> Iterator[int]:
    """List the sockets that a process holds."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                if match:
                    yield int(match.group(1))


def has_socket(pid: int, port: int) -> bool:
    """Return True if the process has a TCP connection to this port, or listens there."""
    found, mark = set(), f":{port:04X}"
    with contextlib.suppress(OSError, IndexError):
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[1].endswith(mark) or words[2].endswith(mark):
                    found.add(int(words[9]))
    return not found.isdisjoint(list_inodes(pid))


def read_received(besides: int) -> Dict[int, int]:
    """Return the bytes received by each TCP connection of this network namespace, keyed by inode,
    except connections with the port `besides`; raise OSError if the kernel does not provide the
    numbers."""
    found = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as link:
        link.settimeout(LIMIT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << INFO - 1, STATES)
            link.send(HEAD.pack(HEAD.size + len(body), BY_FAMILY, DUMP, 0, 0) + body)
            is_done = False
            while not is_done:
                data = link.recv(1 << 16)
                while data:
                    size, kind, *_ = HEAD.unpack_from(data)
                    message, data = data[HEAD.size : size], data[size + 3 & ~3 :]
                    is_done = kind == DONE
                    if kind == BY_FAMILY and besides not in struct.unpack_from(
                        ">HH", message, PORTS
                    ):
                        (inode,) = struct.unpack_from("=I", message, INODE)
                        found[inode] = _find_received(message[BODY:])
                    elif not is_done and kind != BY_FAMILY:
                        raise OSError("sock_diag is refused")
    return found


def _find_received(attributes: bytes) -> int:
    while attributes:
        size, kind = struct.unpack_from("=HH", attributes)
        if kind == INFO and size >= 4 + RECEIVED + 8:
            (received,) = struct.unpack_from("=Q", attributes, 4 + RECEIVED)
            return int(received)
        attributes = attributes[size + 3 & ~3 :]
    raise OSError("this kernel does not count bytes")


def measure_received(pid: int) -> int:
    """Return the bytes that a process' network namespace received, except from itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
        parts = [line.partition(":") for line in lines]
        return sum(int(rest.split()[0]) for name, _, rest in parts if name.strip() != "lo")
    return 0

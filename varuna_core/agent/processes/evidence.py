"""Evidence of a hang, for people: what a node shows of its ranks before they are ended.

    processes   state, wait channel and system call of each thread of a rank, and of what it started
    sockets     a rank's TCP connections: bytes that wait in both queues, resent ones, the other end
    kernel      lines of the last quarter of an hour in the kernel's log, where it may be read
    nccl        the answer of NCCL's RAS, where it listens (tried on a stand-in only, not on a GPU)

Each part has its own thread, so that a driver or a file server which hangs costs `LIMIT_S` at most;
a part that fails says why. Nothing here stops a process or writes to it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Tuple

from varuna_core.agent.processes.kernel_log import KernelLog
from varuna_core.agent.processes.proc import list_below, list_stats, read_environment
from varuna_core.agent.processes.sockets import list_inodes

LIMIT_S = 8.0
MOST_THREADS, MOST_SOCKETS, MOST_LINES = 64, 256, 100
RECENT_S = 900.0
RAS_ADDRESS = ("localhost", 28028)
RAS_S, RAS_BYTES = 5.0, 256 * 1024
STATES = ("", "established", "syn-sent", "syn-received", "fin-wait-1", "fin-wait-2", "time-wait",
          "closed", "close-wait", "last-ack", "listen", "closing")  # fmt: skip

Part = Callable[[], Any]
Address = Tuple[str, int]


def gather_evidence(
    ranks: Mapping[int, int], more: Mapping[str, Part], limit_s: float = LIMIT_S
) -> Dict[str, Any]:
    """Gather all parts of the evidence by name; `ranks` has the pid of each rank, `more` further
    parts of the caller."""
    own = {
        "processes": lambda: list_processes(ranks),
        "sockets": lambda: list_sockets(ranks),
        "kernel": list_kernel_lines,
        "nccl": lambda: ask_nccl(read_ras_address(ranks.values())),
    }
    found: Dict[str, Any] = {}
    threads = [
        threading.Thread(target=_run_part, args=(found, name, part), daemon=True, name=name)
        for name, part in {**own, **more}.items()
    ]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(limit_s - (time.monotonic() - begun), 0.0))
    late = {"problem": f"no answer within {limit_s:g} s"}
    return {"time": time.time(), **{one.name: found.get(one.name, late) for one in threads}}


def _run_part(found: Dict[str, Any], name: str, part: Part) -> None:
    try:
        found[name] = part()
    # A part reads whatever a kernel, a driver or a library says.
    except Exception as error:
        found[name] = {"problem": f"{type(error).__name__}: {error}"}


# Processes.


def list_processes(ranks: Mapping[int, int]) -> List[Dict[str, Any]]:
    """List a rank's own process and its descendants."""
    stats = list_stats()
    found = []
    for rank, main in sorted(ranks.items()):
        for pid in sorted({main} | list_below([main], stats)):
            if pid in stats:
                threads = _list_threads(pid)
                found.append({"rank": rank, "pid": pid, "name": stats[pid].name,
                              "state": stats[pid].state, "threads": threads})  # fmt: skip
    return found


def _list_threads(pid: int) -> List[Dict[str, Any]]:
    folder = Path(f"/proc/{pid}/task")
    found = []
    with contextlib.suppress(OSError):
        for number in sorted(map(int, os.listdir(folder)))[:MOST_THREADS]:
            words = {"state": "", "channel": "", "call": "", "name": ""}
            with contextlib.suppress(OSError):
                stat = (folder / str(number) / "stat").read_text(errors="replace")
                words["name"] = stat.partition("(")[2].rpartition(")")[0]
                words["state"] = stat.rpartition(")")[2].split()[0]
            with contextlib.suppress(OSError):
                words["channel"] = (folder / str(number) / "wchan").read_text().strip("0\n")
            with contextlib.suppress(OSError):  # a number, or `running`; of our own user's alone
                words["call"] = (folder / str(number) / "syscall").read_text().split()[0]
            found.append({"id": number, **words})
    return found


# Sockets.


def list_sockets(ranks: Mapping[int, int]) -> List[Dict[str, Any]]:
    """List TCP connections of ranks; `peer` is the rank at the other end, if it is on this node."""
    stats = list_stats()
    tables: Dict[str, Dict[int, Dict[str, Any]]] = {}
    found = []
    for rank, main in sorted(ranks.items()):
        for pid in sorted({main} | list_below([main], stats)):
            space = ""
            with contextlib.suppress(OSError):
                space = os.readlink(f"/proc/{pid}/ns/net")
            if space not in tables:
                tables[space] = {one["inode"]: one for one in _read_tables(pid)}
            for inode in list_inodes(pid):
                if inode in tables[space]:
                    found.append({"rank": rank, "pid": pid, **tables[space][inode]})
    owners = {(tuple(one["local"]), tuple(one["remote"])): one["rank"] for one in found}
    for one in found:
        one["peer"] = owners.get((tuple(one["remote"]), tuple(one["local"])))
        del one["inode"]
    # Those with bytes in a queue first: they are what somebody waits for.
    found.sort(key=lambda one: -(one["unsent"] + one["unread"]))
    return found[:MOST_SOCKETS]


def _read_tables(pid: int) -> Iterator[Dict[str, Any]]:
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                yield parse_socket(line)


def parse_socket(line: str) -> Dict[str, Any]:
    """Parse a line of /proc/net/tcp or tcp6."""
    words = line.split()
    unsent, unread = (int(word, 16) for word in words[4].split(":"))
    state = int(words[3], 16)
    return {
        "local": _parse_address(words[1]),
        "remote": _parse_address(words[2]),
        "state": STATES[state] if state < len(STATES) else str(state),
        "unsent": unsent,
        "unread": unread,
        "resent": int(words[6], 16),
        "inode": int(words[9]),
    }


def _parse_address(word: str) -> Address:
    """Parse an address, of which the kernel prints four bytes as one number in its byte order."""
    host, _, port = word.partition(":")
    numbers = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(numbers)}I", *numbers)
    if packed[:12] == b"\0" * 10 + b"\xff\xff":  # IPv4 in a socket of IPv6
        packed = packed[12:]
    kind = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(kind, packed), int(port, 16)


def describe_queues(sockets: Any) -> List[str]:
    """Describe bytes that a rank has received but not read, the most first."""
    found: Dict[Tuple[int, str], int] = {}
    for one in sockets if isinstance(sockets, list) else ():
        if one["state"] == "listen" or not one["unread"] or one["peer"] == one["rank"]:
            continue
        host, port = one["remote"]
        sender = f"{host}:{port}" if one["peer"] is None else f"rank {one['peer']}"
        found[one["rank"], sender] = found.get((one["rank"], sender), 0) + one["unread"]
    counted = sorted(found.items(), key=lambda item: -item[1])
    return [
        f"rank {rank} has not read {num_bytes} bytes from {sender}"
        for (rank, sender), num_bytes in counted
    ]


# The kernel's log.


def list_kernel_lines() -> Any:
    """Return the kernel log's last lines, or the problem if they may not be read."""
    log = KernelLog(is_whole=True)
    if log.problem:
        return {"problem": log.problem}
    since = time.clock_gettime(time.CLOCK_MONOTONIC) - RECENT_S
    lines: List[str] = []
    while records := log.read_records():
        lines += [f"[{at:.3f}] {text}" for at, text in records if at >= since]
        lines = lines[-MOST_LINES:]
    log.close()
    return lines


# NCCL.


def read_ras_address(pids: Iterable[int]) -> Address:
    """Return the address at which a rank's NCCL listens: NCCL_RAS_ADDR, else NCCL's default."""
    for pid in pids:
        host, mark, port = read_environment(pid).get("NCCL_RAS_ADDR", "").rpartition(":")
        if mark and port.isdecimal():
            return host.strip("[]") or RAS_ADDRESS[0], int(port)
    return RAS_ADDRESS


def ask_nccl(address: Address) -> Dict[str, str]:
    """Ask NCCL about its communicators in a text protocol of lines; return the last answer.
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html"""
    with socket.create_connection(address, timeout=1.0) as link:
        link.settimeout(RAS_S + 1)
        lines = link.makefile("rwb")
        lines.write(b"CLIENT PROTOCOL 2\n")
        lines.flush()
        said = lines.readline(1024).decode(errors="replace")
        if not said.upper().startswith("SERVER PROTOCOL "):
            raise ValueError(f"not NCCL: {said[:80]!r}")
        lines.write(f"TIMEOUT {RAS_S:.0f}\n".encode())
        lines.flush()
        if lines.readline(1024).strip().upper() != b"OK":
            raise ValueError("NCCL's RAS does not allow a time limit")
        lines.write(b"VERBOSE STATUS\n")
        lines.flush()
        return {"text": lines.read(RAS_BYTES).decode(errors="replace")}

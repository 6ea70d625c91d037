"""Processes as /proc shows them: state, parents, processor time; those of a rank in a container.

If a container runtime stays between the agent and the rank, the agent's child is the runtime's
client, and the rank is a grandchild or a child of some daemon. Clients do not pass on signals
reliably (rootless podman 4.3.1: TERM twice, USR1 not at all), and a client that is killed leaves
the rank running. So ranks are found by variables that only their environment has: the runtime's own
processes have just the one variable from which the others are set.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Mapping, NamedTuple, Optional, Set

_TICKS_S = os.sysconf("SC_CLK_TCK")
_FIRST_PID_SPACE = 0xEFFFFFFC
"""The kernel's fixed inode number of the initial pid namespace."""


class Stat(NamedTuple):
    """State of one process."""

    name: str
    state: str
    """The kernel's letter for the state of the main thread: R, S, D (waits for a disk), T
    (stopped), Z, ..."""
    parent: int
    group: int
    ticks: int
    """Processor time of all threads of the process and of its ended children, in clock ticks."""
    started: int
    """Start time in clock ticks; together with the pid it identifies a process uniquely."""
    faults: int = 0
    """How often the process had to wait for a page of a mapped file (major page faults)."""

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"


def read_stat(pid: int) -> Stat | None:
    """Read the state of a process; return None if it does not exist or is not visible to us."""
    # Not through a file object: with every beat this is done for all processes of the node.
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            head, _, tail = os.read(fd, 4096).rpartition(b")")
        finally:
            os.close(fd)
    except OSError:
        return None
    words = tail.split()
    return Stat(
        name=head.partition(b"(")[2].decode(errors="replace"),
        state=words[0].decode(),
        parent=int(words[1]),
        group=int(words[2]),
        ticks=sum(map(int, words[11:15])),
        started=int(words[19]),
        faults=int(words[9]),
    )


def list_stats() -> Dict[int, Stat]:
    """Return the state of all processes that are visible to us, keyed by pid."""
    found = {}
    for name in os.listdir("/proc"):
        stat = read_stat(int(name)) if name.isdecimal() else None
        if stat is not None:
            found[int(name)] = stat
    return found


def list_below(tops: Iterable[int], stats: Mapping[int, Stat]) -> Set[int]:
    """Return the pids of all descendants of these processes."""
    children: Dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: Set[int] = set()
    waiting = list(tops)
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def read_environment(pid: int) -> Dict[str, str]:
    """Read the environment of a process; return an empty one if it is not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            words = handle.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def is_halted(pid: Optional[int]) -> bool:
    """Return True if the process is stopped (SIGSTOP, a debugger), or has ended unreaped."""
    stat = None if pid is None else read_stat(pid)
    return stat is not None and stat.state in "TtZ"


def measure_ranks(mains: Mapping[int, Optional[int]]) -> Dict[str, Dict[str, Any]]:
    """Return pid, state and processor time of each rank that exists; `mains` are pids by rank."""
    stats = list_stats()
    found = {}
    for rank, pid in mains.items():
        if pid is not None and pid in stats:
            held = {pid} | list_below([pid], stats)
            seconds = sum(stats[one].ticks for one in held) / _TICKS_S
            # The program may be a child of the shell, or wait for a child, that somebody stopped.
            state = "T" if any(stats[one].state == "T" for one in held) else stats[pid].state
            found[str(rank)] = {"pid": pid, "state": state, "cpu_s": round(seconds, 1)}
    return found


def sees_machine() -> bool:
    """Return True if this process is in the machine's initial pid namespace, as drivers are."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_SPACE
    except OSError:
        return False


MARKS = ("VJOB_RUN", "VJOB_ATTEMPT", "VJOB_TRACE")
"""Variables that together name one rank of one attempt."""


class ContainerProcesses:
    """The processes of one rank that runs in a container."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._marks = [
            f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in env.items()
        ]
        self._main: int | None = None
        self._started = 0

    def find_main(self) -> int | None:
        """Return the program itself: the first process, which is the parent of the others."""
        if self._main is not None:
            stat = read_stat(self._main)
            if stat is not None and stat.started == self._started and stat.is_alive:
                return self._main
        found = self._find()
        if not found:
            return None
        tops = [pid for pid, stat in found.items() if stat.parent not in found]
        self._main = min(tops, key=lambda pid: (found[pid].started, pid))
        self._started = found[self._main].started
        return self._main

    def find_group(self) -> list[int]:
        """Return the program, and those of its children that share its process group."""
        main = self.find_main()
        found = self._find()
        if main not in found:
            return []
        return [pid for pid, stat in found.items() if stat.group == found[main].group]

    def find_all(self) -> list[int]:
        """Return all processes, also those that have left for process groups of their own."""
        return list(self._find())

    def _find(self) -> dict[int, Stat]:
        found = {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and self._is_ours(name):
                stat = read_stat(int(name))
                if stat is not None and stat.is_alive:
                    found[int(name)] = stat
        return found

    def _is_ours(self, name: str) -> bool:
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = set(file.read().split(b"\0"))
        except OSError:  # gone, or another user's
            return False
        return all(mark in variables for mark in self._marks)

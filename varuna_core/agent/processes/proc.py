"""What /proc tells of processes: how they are, who started whom, what processor time they took."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Mapping, NamedTuple, Optional, Set

_TICKS_S = os.sysconf("SC_CLK_TCK")
_FIRST_PID_SPACE = 0xEFFFFFFC
"""The kernel's fixed number of the pid name space that it began with."""


class Stat(NamedTuple):
    """One process."""

    name: str
    state: str
    """The kernel's letter for its first thread: R, S, D (waits for a disk), T (stopped), Z, ..."""
    parent: int
    group: int
    ticks: int
    """Processor time of all its threads, and of those children that have ended."""
    started: int
    """In clock ticks: with the pid it names one process for ever."""

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"


def read_stat(pid: int) -> Stat | None:
    """None where there is no such process, or none that we may see."""
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
    )


def list_stats() -> Dict[int, Stat]:
    """All processes that we may see, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        stat = read_stat(int(name)) if name.isdigit() else None
        if stat is not None:
            found[int(name)] = stat
    return found


def list_below(tops: Iterable[int], stats: Mapping[int, Stat]) -> Set[int]:
    """The pids of these processes' children, their children, and so on."""
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


def is_halted(pid: Optional[int]) -> bool:
    """Whether somebody stopped it (SIGSTOP, a debugger), or it ended and was not reaped."""
    stat = None if pid is None else read_stat(pid)
    return stat is not None and stat.state in "TtZ"


def measure_ranks(mains: Mapping[int, Optional[int]]) -> Dict[str, Dict[str, Any]]:
    """What a beat says of each rank whose process is there: `mains` are pids by rank."""
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
    """Whether our pids are the machine's own, as drivers count them."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_SPACE
    except OSError:
        return False

"""A rank's own processes where a container runtime stays in between.

The agent's child is then the runtime's client, and the rank is a grandchild, or a child of some
daemon. Clients pass signals on in ways of their own (rootless podman 4.3.1: TERM twice, USR1 not at
all), and one that is killed leaves the rank running. So ranks are found by what only they have in
their environment: the runtime's processes have but the one variable that enters.
"""

from __future__ import annotations

import os
from typing import Mapping

from varuna_core.agent.processes.proc import Stat, read_stat

MARKS = ("VJOB_RUN", "VJOB_ATTEMPT", "RANK")
"""Variables that together name one rank of one attempt."""


class Insiders:
    """The processes of one rank."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._marks = [
            f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in env.items()
        ]
        self._main: int | None = None
        self._started = 0

    def find_main(self) -> int | None:
        """The program itself: the first process, and parent of the others."""
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
        """The program, and those of its children that share its process group."""
        main = self.find_main()
        found = self._find()
        if main not in found:
            return []
        return [pid for pid, stat in found.items() if stat.group == found[main].group]

    def find_all(self) -> list[int]:
        """Also those that ran off in groups of their own."""
        return list(self._find())

    def _find(self) -> dict[int, Stat]:
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and self._is_ours(name):
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

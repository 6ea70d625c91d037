"""Forked ranks: one process imports what all ranks of a node need, forks them, and ends.

    agent ── PROGRAM SETTINGS --fork ──► origin: imports, forks each rank, reports its pid, ends
      └──── adopts the ranks: each is its child then, in a session and with pipes of its own

The process that forks the ranks is called their origin. It is used only for the built-in programs,
outside of containers, if the ranks' environments differ in nothing that is read at import (`fits`).
If the origin ends before it has forked, its ranks count as ended. Modules that the origin could not
import are imported again by the ranks, which report the error.

With `--standby` an origin is started while an earlier attempt trains: it imports at once, waits,
and is used by one attempt, or by none. It is a child of the agent of that attempt, and dies with
this agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import replace
from typing import Mapping, Sequence

from varuna_core.agent.processes.process import RankProcess, start_rank
from varuna_core.agent.setup.ranks import INTERFACE_NAMES, RankStart
from varuna_core.agent.setup.site import Site
from varuna_core.agent.setup.world import follows_place

FORK, STANDBY = "--fork", "--standby"
"""Options of the built-in programs for ranks that are forked from one process
(varuna_core/programs/forking.py)."""


def can_fork(site: Site, starts: Sequence[RankStart]) -> bool:
    """Return True if these ranks of the node may be forked from a single process."""
    plan = site.plan
    if site.container is not None or plan.prefix or plan.timeline:
        return False
    is_built_in = starts[0].argv[-2:-1] == (str(site.run.program),)
    alike = all(start.argv == starts[0].argv and fits(starts[0], start) for start in starts)
    return is_built_in and alike


def fits(model: RankStart, start: RankStart) -> bool:
    """Return True if two starts differ only in the last word of the command, which names the
    settings, and in the rank's place."""
    plain = replace(model, argv=(), env=_strip(model.env)) == replace(
        start, argv=(), env=_strip(start.env)
    )
    return plain and _same_program(model.argv, start.argv)


def _same_program(first: Sequence[str], second: Sequence[str]) -> bool:
    return len(first) == len(second) > 1 and first[:-1] == second[:-1]


def _strip(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if not name.startswith("VJOB_") and name not in INTERFACE_NAMES and not follows_place(name)
    }


class Origin:
    """The agent's handle on the process that forks the ranks, for the agent's main thread only."""

    def __init__(self, model: RankStart, count: int, word: str = FORK) -> None:
        """Start the origin, a process that forks up to `count` ranks like `model`. Call this from
        the main thread of a process that adopts orphans: the ranks die with that process. Raise
        OSError if the origin cannot start."""
        self._model = model
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
        self._reading = [(out, err) for (out, _), (err, _) in pipes]
        self._writing = [(out, err) for (_, out), (_, err) in pipes]
        passed = [end for pair in self._writing for end in pair]
        try:
            # What Python itself says as it starts is an error of the first rank.
            self._process = start_rank(
                [*model.argv, word],
                model.env,
                model.cwd,
                waits=True,
                errors=passed[1],
                passed=passed,
            )
        except OSError:
            _close(self._reading)
            raise
        finally:
            _close(self._writing)
        self._said = b""
        self._code: int | None = None
        self.pids: list[int] = []
        """Process ids of the ranks that were forked so far, in the order of the ranks."""
        os.set_blocking(self._process.stdout, False)

    def fits(self, starts: Sequence[RankStart]) -> bool:
        """Return True if this origin may fork these ranks, which are alike."""
        return len(starts) <= len(self._reading) and fits(self._model, starts[0])

    def fork(self, starts: Sequence[RankStart]) -> list[RankProcess]:
        """Return the ranks, whose processes are forked later; empty if the origin has ended."""
        tasks = [
            {"env": start.env, "out": out, "err": err}
            for start, (out, err) in zip(starts, self._writing)  # noqa: B905 - Python 3.8
        ]
        arguments = starts[0].argv[len(self._model.argv) - 1 :]
        task = {"agent": os.getpid(), "arguments": arguments, "ranks": tasks}
        if not self._process.tell(json.dumps(task)):
            self.end()
            return []
        count = len(starts)
        _close(self._reading[count:])
        return [ForkedRank(self, at, *self._reading[at]) for at in range(count)]

    def end(self) -> None:
        """Kill the origin (the process that forks the ranks), which has not forked any."""
        self._process.signal_group(signal.SIGKILL)
        self._process.close()
        _close(self._reading)

    def look(self) -> int | None:
        """Return the exit code of the origin, the process that forks the ranks, once it has ended,
        else None. Update `pids`, the process ids of the forked ranks."""
        if self._code is None:
            code = self._process.poll()
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self._process.stdout, 4096):
                    self._said += data
            self.pids = [int(word) for word in self._said.split(b"\n")[:-1]]
            if code is not None:
                self._code = code
                self._process.close()
        return self._code

    def signal_group(self, number: int) -> None:
        self._process.signal_group(number)


class ForkedRank(RankProcess):
    """A rank that its origin forks; until then it has no pid, and a signal ends the origin."""

    def __init__(self, origin: Origin, place: int, stdout: int, stderr: int) -> None:
        self._origin, self._place = origin, place
        self.pid, self.stdout, self.stderr = 0, stdout, stderr
        self._code: int | None = None
        self._owed: list[int] = []
        """Signals that were sent before the rank had a pid."""

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        ended = self._origin.look()
        if not self.pid and self._place < len(self._origin.pids):
            self.pid = self._origin.pids[self._place]
            for number in self._owed:
                self.signal_group(number)
        if ended is None:
            return None
        if not self.pid:
            self._code = ended or 1
            return self._code
        # Not reaped yet, so that the group's number cannot belong to somebody else.
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        except ChildProcessError:  # not ours yet
            return None
        self.signal_group(signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        self._code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self._code

    def tell(self, text: str) -> bool:
        return False

    def close(self) -> None:
        _close([(self.stdout, self.stderr)])

    def find_main(self) -> int | None:
        return self.pid or None

    def find_strangers(self) -> list[int]:
        return []

    def signal(self, number: int) -> None:
        if self.pid and self._code is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        if self._code is not None:
            return
        if self.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, number)
        else:
            self._owed.append(number)
            self._origin.signal_group(number)


def _close(pairs: Sequence[tuple[int, int]]) -> None:
    for pair in pairs:
        for end in pair:
            os.close(end)

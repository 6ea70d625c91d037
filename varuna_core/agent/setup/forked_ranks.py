"""Forked ranks: one process imports what all ranks of a node need, forks them, and ends.

    agent ── PROGRAM SETTINGS --fork ──► origin: imports, forks each rank, reports its pid, ends
      └──── adopts the ranks: each is its child then, in a session and with pipes of its own

For the built-in programs alone, outside of containers, where the ranks' environments differ in
nothing that is read at import (`fits`). An origin that ends before it has forked is the end of its
ranks; what it could not import the ranks import again, and say what is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Sequence

from varuna_core.agent.processes.process import RankProcess, start_rank
from varuna_core.agent.setup.ranks import RankStart
from varuna_core.agent.setup.site import Site
from varuna_core.agent.setup.standby_ranks import fits

FORK = "--fork"
"""The built-in programs take it (varuna_core/programs/forking.py)."""


def can_fork(site: Site, starts: Sequence[RankStart]) -> bool:
    """True if these ranks of the node may come from one process."""
    plan = site.plan
    if site.container is not None or plan.prefix or plan.timeline or len(starts) < 2:
        return False
    is_built_in = starts[0].argv[-2:-1] == (str(site.run.program),)
    alike = all(start.argv == starts[0].argv and fits(starts[0], start) for start in starts)
    return is_built_in and alike


def fork_ranks(starts: Sequence[RankStart]) -> list[RankProcess]:
    """The ranks, whose processes come later. OSError where not even the origin could start.

    From the main thread of a process that adopts orphans: with it the ranks die.
    """
    pipes = [(os.pipe(), os.pipe()) for _ in starts]
    writing = [end for pair in pipes for _, end in pair]
    reading = [end for pair in pipes for end, _ in pair]
    first = starts[0]
    try:
        # What Python itself says as it starts is an error of the first rank.
        process = start_rank(
            [*first.argv, FORK],
            first.env,
            first.cwd,
            waits=True,
            errors=writing[1],
            passed=writing,
        )
    except OSError:
        for end in reading:
            os.close(end)
        raise
    finally:
        for end in writing:
            os.close(end)
    tasks = [
        {"env": start.env, "out": writing[2 * at], "err": writing[2 * at + 1]}
        for at, start in enumerate(starts)
    ]
    process.tell(json.dumps({"agent": os.getpid(), "ranks": tasks}))
    origin = Origin(process)
    return [ForkedRank(origin, at, out, err) for at, ((out, _), (err, _)) in enumerate(pipes)]


class Origin:
    """The process that forks the ranks; all of it in the agent's main thread."""

    def __init__(self, process: RankProcess) -> None:
        self._process, self._said = process, b""
        self._code: int | None = None
        self.pids: list[int] = []
        """Of the ranks that it has forked, in their order."""
        os.set_blocking(process.stdout, False)

    def look(self) -> int | None:
        """Its return code once it has ended; the pids that it reported are known then."""
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
        """Signals from before it had a pid."""

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
        for pipe in (self.stdout, self.stderr):
            os.close(pipe)

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

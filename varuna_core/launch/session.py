"""Session: plays one attempt over ssh, as srun and the batch script do under Slurm.

probe all machines ─► open on the first ─► an agent on each ─► follow ─► close
                                                │
an agent or its ssh ends badly   stop.json: the others end their ranks
SIGINT, SIGTERM, SIGHUP to us    stop.json
SIGUSR1, SIGUSR2 to us           signal.json: every rank gets it
we are killed                    the agents' standard input ends, and they with it
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from varuna_core.agent.closing import close_attempt
from varuna_core.agent.processes.signals import Signals
from varuna_core.launch.console import Console
from varuna_core.launch.errors import NotReadyError
from varuna_core.launch.machines import Machine
from varuna_core.launch.process import TICK_S, Child, local_environment, wait_all
from varuna_core.launch.ssh import FAILED, build_ssh_command, explain_failure, render_script
from varuna_core.records.exits import NODE_LOST
from varuna_core.records.files import is_listed, read_json
from varuna_core.records.plan import Plan
from varuna_core.records.requests import write_signal, write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder

BEAT_S = 5.0
OPEN_S = 120.0
MARGIN_S = 15.0
"""Beyond the agents' own grace, before we let go of them; as much again before we kill."""
KEPT_LINES = 20


@dataclass
class LaunchedNode:
    """A machine of the run, with the agent that it runs."""

    index: int
    machine: Machine
    name: str
    python: str
    """Of the agent."""
    ssh_config: str | None
    child: Child | None = None
    last_lines: list[str] = field(default_factory=list)
    is_over: bool = False

    def start(self, words: Sequence[str]) -> Child:
        """A command of the agent on this machine."""
        env = {"VJOB_NODE_NAME": self.name}
        command = [self.python, *words]
        if self.machine.is_local:
            return Child(command, env={**local_environment(os.environ), **env})
        ssh = build_ssh_command(self.machine, self.ssh_config)
        return Child(ssh, render_script(command, env))


class Session:
    """The agents of one attempt."""

    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        attempt: AttemptFolder,
        nodes: Sequence[LaunchedNode],
        signals: Signals,
        console: Console,
    ) -> None:
        self._run, self._plan, self._attempt = run, plan, attempt
        self._nodes, self._signals, self._console = nodes, signals, console
        self._next_beat = 0.0
        self._end_at: float | None = None
        """When we let go of agents that should have ended."""
        self._has_let_go = False
        self._is_told = False

    def play(self, address: str | None) -> int:
        """The true exit code of the attempt."""
        try:
            self._open(address)
            self._heed_signals()
            if not self._is_told:
                self._start()
            while any(node.child is not None and not node.is_over for node in self._nodes):
                self._signals.wait(TICK_S)
                self._heed_signals()
                self._take_lines()
                self._beat()
                self._give_up_when_due()
                self._console.look()
            self._await_lost()
            return self._close()
        finally:
            for node in self._nodes:
                if node.child is not None:
                    node.child.close()

    def _close(self) -> int:
        codes = [node.child.code or 0 for node in self._nodes if node.child is not None]
        status = max((128 - code if code < 0 else code for code in codes), default=0)
        words = io.StringIO()
        with contextlib.redirect_stderr(words):  # ours may be closed
            closed = close_attempt(self._run, self._plan, self._attempt.number, None, status)
        self._console.look(final=True)
        for line in words.getvalue().splitlines():
            self._console.pass_on(line)
        return closed.code

    def _words(self, command: str, *rest: str) -> list[str]:
        number = str(self._attempt.number)
        run = str(self._run.path)
        return [str(self._run.agent), command, "--run", run, "--attempt", number, *rest]

    def _open(self, address: str | None) -> None:
        """On the first machine: there the port is to be free, and the address its own."""
        first = self._nodes[0]
        given = () if address is None else ("--address", address)
        child = first.start(self._words("open", *given))
        wait_all([child], self._signals, OPEN_S)
        code = child.code
        errors = child.err.decode("utf-8", "replace")
        child.close()
        for line in errors.splitlines():
            self._console.pass_on(f"{first.name}: {line}")
        if code == 0 or self._signals.ending is not None:
            return
        if not first.machine.is_local and code == FAILED:
            raise NotReadyError(f"{first.machine}: {explain_failure(first.machine, errors)}")
        raise NotReadyError(f"{first.machine}: the attempt could not be opened there, see above")

    def _start(self) -> None:
        self._console.follow(self._attempt, [node.name for node in self._nodes])
        for node in self._nodes:
            node.child = node.start(self._words("node", "--node", str(node.index), "--tether"))

    def _heed_signals(self) -> None:
        for number in self._signals.take_forwarded():
            name = signal.Signals(number).name
            self._console.say(f"{name} goes to every rank")
            try:
                write_signal(self._attempt, name[len("SIG") :], uuid.uuid4().hex)
            except OSError as error:
                self._console.say(f"{name} did not reach the ranks: {error}")
        name = self._signals.ending or ""
        if name and not self._is_told:
            self._is_told = True
            self._console.say(f"{name}: ending all ranks, within {self._plan.timing.grace_s:g} s")
            code = 128 + signal.Signals[name]
            self._stop("cancel", code, f"{name} to the launcher on {os.uname().nodename}", None)

    def _take_lines(self) -> None:
        for node in self._nodes:
            if node.is_over or node.child is None:
                continue
            code = node.child.code
            lines = node.child.take_lines(final=code is not None)
            for line in lines:
                self._console.pass_on(f"{node.name}: {line}")
            node.last_lines = [*node.last_lines, *lines][-KEPT_LINES:]
            if code is not None:
                node.is_over = True
                if code != 0:
                    reason = self._explain(node, code)
                    if _is_cut(node) and not self._is_told:
                        self._console.say(reason)
                    self._stop("lost", NODE_LOST, reason, node.name)

    def _explain(self, node: LaunchedNode, code: int) -> str:
        """Why an agent ended so; heard only where the agent itself did not say stop."""
        what = "its agent" if node.machine.is_local else "the ssh to it"
        if code < 0:
            try:
                return f"{node.name} was lost: {what} was ended by {signal.Signals(-code).name}"
            except ValueError:
                return f"{node.name} was lost: {what} was ended by signal {-code}"
        if code == FAILED and not node.machine.is_local:
            reason = explain_failure(node.machine, "\n".join(node.last_lines))
            return f"{node.name} was lost: {reason}"
        last = f": {node.last_lines[-1]}" if node.last_lines else ""
        return f"{node.name} was lost: its agent ended with {code}{last}"

    def _stop(self, kind: str, code: int, reason: str, node: str | None) -> None:
        if self._end_at is None:
            self._end_at = time.monotonic() + self._plan.timing.grace_s + MARGIN_S
        try:
            write_stop(self._attempt, kind, code, reason, node=node)
        except OSError as error:
            self._console.say(f"the run folder cannot be written ({error}); letting go of all")
            self._let_go()

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat or self._has_let_go:
            return
        self._next_beat = now + BEAT_S
        for node in self._nodes:
            if node.child is not None and not node.is_over:
                node.child.beat()

    def _give_up_when_due(self) -> None:
        if self._end_at is None or time.monotonic() < self._end_at:
            return
        self._end_at = time.monotonic() + MARGIN_S
        late = [node for node in self._nodes if node.child is not None and not node.is_over]
        names = ", ".join(node.name for node in late)
        if not self._has_let_go:
            self._console.say(f"{names} did not end in time; closing the connection")
            self._let_go()
            return
        self._console.say(f"{names} still did not end; killed")
        for node in late:
            if node.child is not None:
                node.child.kill()

    def _let_go(self) -> None:
        self._has_let_go = True
        for node in self._nodes:
            if node.child is not None:
                node.child.let_go()

    def _await_lost(self) -> None:
        """A machine whose ssh was cut ends its ranks by itself: let it, so that nothing stays."""
        cut = [node for node in self._nodes if _is_cut(node) and not node.machine.is_local]
        deadline = time.monotonic() + self._plan.timing.grace_s + MARGIN_S
        said = False
        while cut and time.monotonic() < deadline:
            cut = [node for node in cut if self._is_at_work(node)]
            if cut and not said:
                said = True
                names = ", ".join(node.name for node in cut)
                self._console.say(f"waiting for {names} to end its ranks")
            self._signals.wait(TICK_S)
            self._console.look()

    def _is_at_work(self, node: LaunchedNode) -> bool:
        """True if its agent beat, and did not say yet that it is done."""
        path = self._attempt.beat(node.index)
        beat = read_json(path) if is_listed(path) else None
        return isinstance(beat, dict) and beat.get("state") != "done"


def _is_cut(node: LaunchedNode) -> bool:
    """True if the agent, or the way to it, ended without the agent's own word."""
    code = node.child.code if node.child is not None else None
    return code is not None and (code < 0 or (code == FAILED and not node.machine.is_local))

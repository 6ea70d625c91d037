"""Keep agents on a changing list of machines, for a run that may morph, as srun does under Slurm.

    list ──► machines.decide ──► probe a machine, start `stay` on it, over ssh or here
                             └──► morph/leave/<seat>.json, which the manager reads
    manager's orders: the run has ended ──► start no more agents; the running ones exit

The manager decides how to react to a lost machine, as on Slurm; this module only restarts its agent
later. Each agent holds a pipe to this process (`--tether`), and exits if this process is gone.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from varuna_core.agent.meeting.link import call_hub
from varuna_core.agent.processes.signals import Signals
from varuna_core.launch.errors import LaunchError
from varuna_core.launch.machines import (
    ASK,
    DROP,
    HERE,
    LOOKING,
    TAKE_BACK,
    Host,
    Listing,
    Machine,
    Move,
    decide,
    find_waiting,
    note_end,
    note_failure,
    note_start,
    read_listing,
)
from varuna_core.launch.process import BEAT_S, KEPT_LINES, TICK_S, Child, log_line, start_on
from varuna_core.launch.ssh import (
    FAILED,
    PROBE_S,
    ProbeRequest,
    explain_failure,
    read_probe,
    render_probe,
    render_script,
    request_probe,
)
from varuna_core.morph.orders import read_orders
from varuna_core.records.files import write_json
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.runfolder import RunFolder

LOOK_S = 1.0
"""Seconds between looks at the list."""
MARGIN_S = 15.0
"""Seconds beyond the ranks' grace before an agent's ssh is killed."""


class Agent:
    """The process on a machine: first a probe, then the agent."""

    def __init__(self, child: Child, until: float) -> None:
        self.child, self.until = child, until
        """The process, and the time at which it is killed at the latest."""
        self.last_lines: list[str] = []


class MachineWatch:
    """Keeps agents on a changing list of machines, for one session of a run that may morph."""

    def __init__(self, run: RunFolder, plan: Plan, session: str) -> None:
        assert plan.machine_list is not None
        self._run, self._plan, self._session = run, plan, session
        self._list, self._ssh_config = Path(plan.machine_list), plan.ssh_config
        self._signals = Signals()
        self._listing = Listing()
        self._hosts: tuple[Host, ...] = ()
        self._agents: dict[Machine, Agent] = {}
        self._waiting: list[Machine] = []
        self._token = f".watch-{uuid.uuid4().hex}"
        self._is_closing = False
        self._next_look = self._next_beat = 0.0

    def main(self) -> int:
        """Keep agents running until the run is over or a signal arrives; return the exit code."""
        self._run.morph.make()
        (self._run.path / self._token).write_text(self._token)
        try:
            self._read_list()  # the second look follows at once: who submitted it has read it too
            while not (self._is_closing and not self._agents):
                if time.monotonic() >= self._next_look:
                    self._look()
                self._heed_agents()
                self._beat()
                self._signals.wait(TICK_S)
            return 0
        finally:
            for agent in self._agents.values():
                agent.child.close()
            for path in self._run.path.glob(f"{self._token}*"):
                path.unlink(missing_ok=True)

    def _look(self) -> None:
        """Read the list of machines and the manager's orders, and act on them."""
        self._next_look = time.monotonic() + LOOK_S
        self._close_when_over()
        if self._is_closing:
            return
        self._read_list()
        self._hosts, moves = decide(
            self._hosts,
            self._listing.machines,
            time.monotonic(),
            seats=self._plan.num_nodes,
            own=platform.node(),
        )
        for move in moves:
            self._do(move)
        for host in self._hosts:
            path = self._run.morph.leave(host.seat)
            if host.is_asked and not path.exists():  # a new manager forgets who was asked
                with contextlib.suppress(OSError):  # a disk that is full now may not be later
                    write_json(path, {"node": host.seat})
                    call_hub(self._run.morph.link)
        waiting = find_waiting(self._hosts, self._listing.machines)
        if waiting != self._waiting and waiting:
            names = ", ".join(map(str, waiting))
            self._say(f"{names}: not used, since morph.max_nodes is {self._plan.num_nodes}")
        self._waiting = waiting

    def _read_list(self) -> None:
        text, error = None, ""
        try:
            text = self._list.read_text(encoding="utf-8-sig")
        except OSError as problem:
            error = f"{self._list}: {problem.strerror}"
        except UnicodeDecodeError:
            error = f"{self._list}: this is not text in UTF-8"
        self._listing, notice = read_listing(self._listing, text, error, str(self._list))
        if notice:
            self._say(notice)

    # Moves.

    def _do(self, move: Move) -> None:
        host = move.host
        if move.kind == DROP:
            self._agents.pop(host.machine).child.close()
        elif move.kind == ASK:
            self._say(f"{host.name} is no longer listed: asked to leave at the next checkpoint")
        elif move.kind == TAKE_BACK:
            self._run.morph.leave(host.seat).unlink(missing_ok=True)
            self._say(f"{host.name} is listed again")
        else:
            script = render_probe(self._asked(), self._mark(host))
            self._start(host, ["/bin/sh", "-s"], script, time.monotonic() + PROBE_S)
            if host.machine in self._agents:
                self._agents[host.machine].child.let_go()

    def _start(self, host: Host, here: Sequence[str], script: str, until: float) -> None:
        """Start `here` on this machine, or `script` over ssh on another one. A process that still
        runs at the time `until` is killed."""
        try:
            child = start_on(host.machine, self._ssh_config, here, script)
        except LaunchError as error:
            self._fail(host, str(error))
            return
        self._agents[host.machine] = Agent(child, until)

    def _asked(self) -> ProbeRequest:
        return request_probe(self._run, self._plan, self._token)

    def _mark(self, host: Host) -> str:
        return f"{self._token}.{host.seat}"

    # What machines say.

    def _heed_agents(self) -> None:
        for host in self._hosts:
            agent = self._agents.get(host.machine)
            if agent is None:
                continue
            code = agent.child.code
            if code is None and time.monotonic() >= agent.until:
                agent.child.kill()
            if host.phase == LOOKING:
                agent.child.read()
                if code is not None:
                    self._judge(host, agent, code)
            elif host.phase == HERE:
                lines = agent.child.take_lines(final=code is not None)
                for line in lines:
                    log_line(f"{host.name}: {line}")
                agent.last_lines = [*agent.last_lines, *lines][-KEPT_LINES:]
                if code is not None:
                    self._bury(host, agent, code, lines)

    def _judge(self, host: Host, agent: Agent, code: int) -> None:
        """Read the result of a finished probe: start the agent if the machine is fit."""
        child = agent.child
        _, problem = read_probe(self._asked(), host.machine, code, child.out, child.err)
        child.close()
        del self._agents[host.machine]
        (self._run.path / self._mark(host)).unlink(missing_ok=True)
        if problem is not None:
            self._fail(host, problem)
        elif not self._is_closing:
            self._start_agent(host)

    def _start_agent(self, host: Host) -> None:
        self._run.morph.leave(host.seat).unlink(missing_ok=True)  # for whoever sat there
        self._put(note_start(host, time.monotonic()))
        with contextlib.suppress(OSError):  # only who asks for stacks reads it
            write_json(self._run.machines, {at.name: str(at.machine) for at in self._hosts})
        words = ["bash", str(self._run.node_script)]
        env = {
            "VJOB_RUN": str(self._run.path),
            "VJOB_SESSION": self._session,
            "VJOB_GROUP": "",
            "VJOB_NODE_NAME": host.name,
            "SLURM_NODEID": str(host.seat),
        }
        self._start(host, ["/bin/sh", "-s"], render_script(words, env), float("inf"))
        if host.machine in self._agents:
            self._say(f"{host.name} ({host.machine}): its agent starts, seat {host.seat}")

    def _bury(self, host: Host, agent: Agent, code: int, lines: Sequence[str]) -> None:
        """Handle the end of an agent: log the reason, and note when to start it again."""
        agent.child.close()
        del self._agents[host.machine]
        after = note_end(host, code, time.monotonic())
        self._put(after)
        self._close_when_over()
        if self._is_closing:
            return
        if after.is_sent_home:
            self._say(
                f"{host.name} left the run as it was asked to; to use it again, remove its line "
                "from the list of machines, and add it again some seconds later"
            )
        elif code != 0:
            reason = _explain(host, agent, code, lines)
            self._say(f"{reason}; {_say_again(after)}")

    def _fail(self, host: Host, reason: str) -> None:
        after = note_failure(host, time.monotonic())
        self._put(after)
        self._say(f"{host.name} ({host.machine}): {reason}; {_say_again(after)}")

    def _put(self, host: Host) -> None:
        self._hosts = tuple(host if item.machine == host.machine else item for item in self._hosts)

    # The end.

    def _close_when_over(self) -> None:
        orders = read_orders(self._run.morph)
        is_over = orders is not None and orders.session == self._session and orders.end
        if (is_over or self._signals.ending is not None) and not self._is_closing:
            self._close(at_once=not is_over)

    def _close(self, *, at_once: bool) -> None:
        """Start no further agents and wait for the running ones, or end them if `at_once`."""
        self._is_closing = True
        until = time.monotonic() + self._plan.timing.grace_s + MARGIN_S
        for host in self._hosts:
            agent = self._agents.get(host.machine)
            if agent is None:
                continue
            agent.until = min(agent.until, until)
            if at_once or host.phase == LOOKING:
                agent.child.let_go()

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        for host in self._hosts:
            if host.phase == HERE and host.machine in self._agents:
                self._agents[host.machine].child.beat()

    def _say(self, text: str) -> None:
        log_line(f"machines: {text}")


def _explain(host: Host, agent: Agent, code: int, lines: Sequence[str]) -> str:
    what = "its agent" if host.machine.is_local else "the ssh to it"
    if code < 0:
        return f"{host.name}: {what} was ended by signal {-code}"
    if code == FAILED and not host.machine.is_local:
        if not lines:
            return f"{host.name}: its agent was killed there, or ssh ended without a message"
        return f"{host.name}: {explain_failure(host.machine, chr(10).join(lines))}"
    last = f": {agent.last_lines[-1]}" if agent.last_lines else ""
    return f"{host.name}: its agent exited with {code}{last}"


def _say_again(host: Host) -> str:
    return f"trying again in {max(host.again_at - time.monotonic(), 0):.0f} s if it is still listed"


def main() -> int:
    """Watch the list of machines; the batch script calls this instead of srun."""
    run = RunFolder(Path(os.environ["VJOB_RUN"]))
    plan = read_plan(run.plan)
    if plan is None:
        print(f"machines: {run.plan} cannot be read", file=sys.stderr)
        return 1
    return MachineWatch(run, plan, os.environ["VJOB_SESSION"]).main()


if __name__ == "__main__":
    sys.exit(main())

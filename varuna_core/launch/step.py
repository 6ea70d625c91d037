"""Run one attempt of a fixed run on a list of machines, as `srun` does in a Slurm job.

    VJOB_RUN=DIR VJOB_ATTEMPT=N python -m varuna_core.launch.step srun OPTIONS ...

The batch script calls this module instead of srun; of srun's options only `--wait` is used, since
the plan has the others. The first machines of the list are the nodes of the plan, in order.

    probe all machines ───► open the attempt on the first ─► an agent on each ─► wait for all
                                                                    │
    an agent or its ssh ends badly       stop.json: the others end their ranks
    SIGINT, SIGTERM, SIGHUP              stop.json
    this process is killed               the agents' standard input ends, and so the agents
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from varuna_core.agent.meeting.link import call_hub
from varuna_core.agent.processes.signals import Signals
from varuna_core.facts.cause import EndCause
from varuna_core.launch.errors import LaunchError, NotReadyError
from varuna_core.launch.machines import Machine, name_machines, read_machine_list
from varuna_core.launch.process import (
    BEAT_S,
    KEPT_LINES,
    TICK_S,
    Child,
    log_line,
    start_on,
    wait_all,
)
from varuna_core.launch.ssh import (
    FAILED,
    PROBE_S,
    explain_failure,
    find_twins,
    read_probe,
    render_probe,
    render_script,
    request_probe,
)
from varuna_core.records.exits import NODE_LOST, NOT_READY, name_signal
from varuna_core.records.files import is_listed, read_json, write_atomic, write_json
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import RunFolder

OPEN_S = 120.0
MARGIN_S = 15.0
"""Seconds beyond the agents' own grace before their input is closed; and again before a kill."""


@dataclass
class Node:
    """A machine of the attempt, and the agent that runs on it."""

    index: int
    machine: Machine
    name: str
    python: str = "python3"
    """Interpreter for the agent."""
    child: Child | None = None
    last_lines: list[str] = field(default_factory=list)
    is_over: bool = False


class Step:
    """Runs the agents of one attempt, one on each machine."""

    def __init__(self, run: RunFolder, plan: Plan, number: int, wait_s: float) -> None:
        self._run, self._plan = run, plan
        self._attempt = run.attempt(number)
        self._wait_s = wait_s
        """Seconds from the first node's end within which all other nodes must end; 0 means no
        limit."""
        self._signals = Signals()
        self._nodes: list[Node] = []
        self._next_beat = 0.0
        self._end_at: float | None = None
        """The time at which late agents are given up."""
        self._first_end: float | None = None
        self._has_let_go = False
        self._is_told = False

    def main(self) -> int:
        """Run the attempt; return the highest exit code of its agents, as srun does for tasks."""
        self._attempt.make()
        try:
            self._nodes = self._list_nodes()
            identities = self._probe()
            if self._signals.ending is None:
                self._open(self._find_address(identities))
            if self._signals.ending is not None:
                self._stop_by_signal()
                return 128 + signal.SIGTERM
            self._start()
            self._wait()
            self._await_lost()
        except LaunchError as error:
            # `close` tells it, as the attempt's outcome.
            cause = EndCause.START_FAILED
            write_stop(self._attempt, "not-ready", NOT_READY, str(error), cause=cause)
            return NOT_READY
        finally:
            for node in self._nodes:
                if node.child is not None:
                    node.child.close()
        codes = [node.child.code or 0 for node in self._nodes if node.child is not None]
        return max((128 - code if code < 0 else code for code in codes), default=0)

    # Before the start.

    def _list_nodes(self) -> list[Node]:
        path = self._plan.machine_list or ""
        machines = read_machine_list(Path(path))
        wanted = self._plan.num_nodes
        if len(machines) < wanted:
            raise NotReadyError(f"{path} has {len(machines)} machines, but the run needs {wanted}")
        names = name_machines(machines[:wanted], platform.node())
        return [Node(index, machines[index], name) for index, name in enumerate(names)]

    def _probe(self) -> list[str]:
        """Probe all machines and return their identities; raise an error with all problems."""
        token = f".step-{uuid.uuid4().hex}"
        asked = request_probe(self._run, self._plan, token)
        write_atomic(self._run.path / token, token)
        try:
            children = [
                self._begin(
                    node, ["/bin/sh", "-s"], render_probe(asked, f"{token}.{node.index}"), {}
                )
                for node in self._nodes
            ]
            wait_all(children, self._signals, PROBE_S)
        finally:
            for path in self._run.path.glob(f"{token}*"):
                path.unlink(missing_ok=True)
        problems, identities = [], []
        for node, child in zip(self._nodes, children, strict=True):
            said, problem = read_probe(asked, node.machine, child.code, child.out, child.err)
            child.close()
            if problem is not None:
                problems.append(f"{node.machine}: {problem}")
            node.python = said.get("agent", node.python)
            identities.append(said.get("machine", ""))
        if problems and self._signals.ending is None:
            raise NotReadyError("\n".join(problems))
        return identities

    def _find_address(self, identities: Sequence[str]) -> str | None:
        """Return the address for rank 0; None if the first machine's agent is to choose it."""
        twins = find_twins([node.name for node in self._nodes], identities)
        has_gpus = any(group.gpus for group in self._plan.groups)
        for first, second in twins:
            shared = ": the ranks of both share its GPUs" if has_gpus else ""
            log_line(f"machines: warning: {first} and {second} are the same machine{shared}")
        if self._plan.address is not None:
            return None
        if len(twins) == len(self._nodes) - 1:
            return "127.0.0.1"
        first_machine = self._nodes[0].machine
        return None if first_machine.is_local else first_machine.host

    def _begin(self, node: Node, here: Sequence[str], script: str, env: Mapping[str, str]) -> Child:
        """Start `here` on this machine, or `script` over ssh on another one."""
        return start_on(node.machine, self._plan.ssh_config, here, script, env)

    def _call(self, node: Node, words: Sequence[str], env: Mapping[str, str]) -> Child:
        """Start a command on a machine, with these variables."""
        if node.machine.is_local:
            return self._begin(node, words, "", env)
        return self._begin(node, (), render_script(words, env), {})

    def _open(self, address: str | None) -> None:
        """Open the attempt on the first machine, which provides the ranks' address and port."""
        first = self._nodes[0]
        words = [first.python, str(self._run.agent), "open", "--run", str(self._run.path)]
        words += ["--attempt", str(self._attempt.number)]
        job = os.environ.get("SLURM_JOB_ID")
        words += ["--job-id", job] if job else []
        words += [] if address is None else ["--address", address]
        child = self._call(first, words, {"VJOB_NODE_NAME": first.name})
        wait_all([child], self._signals, OPEN_S)
        code, errors = child.code, child.err.decode("utf-8", "replace")
        child.close()
        for line in errors.splitlines():
            log_line(f"{first.name}: {line}")
        if code == 0 or self._signals.ending is not None:
            return
        if code is None or code < 0:  # killed, perhaps just now
            raise NotReadyError(f"{first.machine}: no answer to `open` within {OPEN_S:g} s")
        if not first.machine.is_local and code == FAILED:
            raise NotReadyError(f"{first.machine}: {explain_failure(first.machine, errors)}")
        raise NotReadyError(f"{first.machine}: the attempt could not be opened there, see above")

    def _start(self) -> None:
        spelled = {node.name: str(node.machine) for node in self._nodes}
        with contextlib.suppress(OSError):  # only who asks for stacks reads it
            write_json(self._run.machines, spelled)
        for node in self._nodes:
            env = {
                "VJOB_RUN": str(self._run.path),
                "VJOB_ATTEMPT": str(self._attempt.number),
                "VJOB_GROUP": "",
                "VJOB_NODE_NAME": node.name,
                "SLURM_NODEID": str(node.index),
            }
            node.child = self._call(node, ["bash", str(self._run.node_script)], env)

    # While it runs.

    def _wait(self) -> None:
        while self._find_living():
            self._signals.wait(TICK_S)
            if self._signals.ending is not None and not self._is_told:
                self._stop_by_signal()
            self._take_lines()
            self._end_late()
            self._beat()
            self._give_up_when_due()

    def _find_living(self) -> list[Node]:
        return [node for node in self._nodes if node.child is not None and not node.is_over]

    def _stop_by_signal(self) -> None:
        self._is_told = True
        name = self._signals.ending or "SIGTERM"
        code = 128 + signal.Signals[name]
        self._stop("cancel", code, f"{name} was sent to the job on {platform.node()}", None)

    def _take_lines(self) -> None:
        for node in self._find_living():
            assert node.child is not None
            code = node.child.code
            lines = node.child.take_lines(final=code is not None)
            for line in lines:
                log_line(f"{node.name}: {line}")
            node.last_lines = [*node.last_lines, *lines][-KEPT_LINES:]
            if code is None:
                continue
            node.is_over = True
            if code == 0:
                self._first_end = self._first_end or time.monotonic()
                continue
            reason = self._explain(node, code)
            if self._is_cut(node) and not self._is_told:
                log_line(f"machines: {reason}")
            is_cut = self._is_cut(node) and not node.machine.is_local
            cause = EndCause.MACHINE_UNREACHABLE if is_cut else EndCause.AGENT_DIED
            self._stop("lost", NODE_LOST, reason, node.name, cause)

    def _end_late(self) -> None:
        """End the nodes that still run when the time after the first node's end is over."""
        late = [node.name for node in self._find_living()]
        if not late or not self._wait_s or self._first_end is None or self._end_at is not None:
            return
        if time.monotonic() > self._first_end + self._wait_s:
            reason = f"{', '.join(late)} did not end within {self._wait_s:g} s of the first node"
            self._stop("signal", 128 + signal.SIGTERM, f"{reason} (cluster.finish_s)", None)

    def _explain(self, node: Node, code: int) -> str:
        """Describe why an agent ended; used only if the agent itself recorded no stop."""
        what = "its agent" if node.machine.is_local else "the ssh to it"
        if code < 0:
            return f"{node.name} was lost: {what} was ended by {name_signal(-code) or -code}"
        if self._is_cut(node):
            if not node.last_lines:
                return f"{node.name} was lost: its agent was killed, or ssh ended without a message"
            reason = explain_failure(node.machine, "\n".join(node.last_lines))
            return f"{node.name} was lost: {reason}"
        last = f": {node.last_lines[-1]}" if node.last_lines else ""
        return f"{node.name} was lost: its agent exited with {code}{last}"

    def _stop(
        self,
        kind: str,
        code: int,
        reason: str,
        node: str | None,
        cause: EndCause | None = None,
    ) -> None:
        if self._end_at is None:
            self._end_at = time.monotonic() + self._plan.timing.grace_s + MARGIN_S
        try:
            if write_stop(self._attempt, kind, code, reason, node=node, cause=cause):
                call_hub(self._attempt.link)
        except OSError as error:
            log_line(f"machines: the run folder cannot be written ({error}); disconnecting all")
            self._let_go()

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat or self._has_let_go:
            return
        self._next_beat = now + BEAT_S
        for node in self._find_living():
            assert node.child is not None
            node.child.beat()

    def _give_up_when_due(self) -> None:
        late = self._find_living()
        if self._end_at is None or time.monotonic() < self._end_at or not late:
            return
        self._end_at = time.monotonic() + MARGIN_S
        names = ", ".join(node.name for node in late)
        if not self._has_let_go:
            log_line(f"machines: {names} did not end in time; closing the connection")
            self._let_go()
            return
        log_line(f"machines: {names} still did not end and are killed")
        for node in late:
            if node.child is not None:
                node.child.kill()

    def _let_go(self) -> None:
        self._has_let_go = True
        for node in self._nodes:
            if node.child is not None:
                node.child.let_go()

    def _await_lost(self) -> None:
        """Wait until machines whose ssh connection broke have ended their ranks by themselves."""
        cut = [node for node in self._nodes if self._is_cut(node) and not node.machine.is_local]
        deadline = time.monotonic() + self._plan.timing.grace_s + MARGIN_S
        said = False
        while cut and time.monotonic() < deadline:
            cut = [node for node in cut if self._is_at_work(node)]
            if cut and not said:
                said = True
                names = ", ".join(node.name for node in cut)
                log_line(f"machines: waiting for {names} to end its ranks")
            self._signals.wait(TICK_S)

    def _is_at_work(self, node: Node) -> bool:
        """Return True if the node's agent sent heartbeats and has not reported that it is done."""
        return self._read_state(node) not in (None, "done")

    def _is_cut(self, node: Node) -> bool:
        """Return True if the agent or its ssh ended before the agent reported that it is done; code
        255 alone is ambiguous, since an agent returns a rank's code."""
        code = node.child.code if node.child is not None else None
        if code == FAILED and not node.machine.is_local:
            return self._read_state(node) != "done"
        return code is not None and code < 0

    def _read_state(self, node: Node) -> str | None:
        """Return the state in the agent's last heartbeat; None before the first one."""
        path = self._attempt.beat(node.index)
        beat = read_json(path) if is_listed(path) else None
        return str(beat.get("state")) if isinstance(beat, dict) else None


def read_wait(words: Sequence[str]) -> float:
    """Return the seconds of `--wait` in srun's options; 0 without it."""
    given = [word.partition("=")[2] for word in words if word.startswith("--wait=")]
    return float(given[-1]) if given else 0.0


def main(words: Sequence[str]) -> int:
    """Run an attempt; the batch script calls this instead of srun."""
    run = RunFolder(Path(os.environ["VJOB_RUN"]))
    plan = read_plan(run.plan)
    if plan is None:
        log_line(f"machines: {run.plan} cannot be read")
        return 1
    return Step(run, plan, int(os.environ["VJOB_ATTEMPT"]), read_wait(words)).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Stand-ins for srun and scontrol on a machine without Slurm.

    python -m vjob.jobs.schedulers.local.srun srun OPTIONS COMMAND... [: OPTIONS COMMAND...]
    python -m vjob.jobs.schedulers.local.srun scontrol requeue|show ...

Only the options that vjob's batch scripts use are supported. Each "node" is a process group.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from vjob.jobs import process
from vjob.jobs.schedulers.node_names import expand_nodes


@dataclass(frozen=True, kw_only=True)
class Component:
    """One component of a step."""

    nodes: int
    het_group: str | None
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SrunStep:
    """A parsed srun command line."""

    components: tuple[Component, ...]
    kill_on_bad_exit: bool
    wait_s: float


IGNORED = (
    "export", "input", "unbuffered", "cpu-bind", "ntasks-per-node", "cpus-per-task", "no-kill",
)  # fmt: skip


def parse_srun(argv: Sequence[str]) -> SrunStep:
    """Parse an srun command line as vjob's templates write it."""
    components = []
    kill, wait_s = False, 0.0
    for part in _split(argv):
        nodes, het_group = 1, None
        rest = list(part)
        while rest and rest[0].startswith("--"):
            name, _, value = rest.pop(0)[2:].partition("=")
            if name == "nodes":
                nodes = int(value)
            elif name == "het-group":
                het_group = value
            elif name == "kill-on-bad-exit":
                kill = value != "0"
            elif name == "wait":
                wait_s = float(value)
            elif name not in IGNORED:
                raise SystemExit(f"srun (local stand-in): --{name} is not supported")
        components.append(Component(nodes=nodes, het_group=het_group, command=tuple(rest)))
    return SrunStep(components=tuple(components), kill_on_bad_exit=kill, wait_s=wait_s)


def _split(argv: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


STEP = "vjob.jobs.schedulers.local.srun"
"""Name of this module for `python -m`."""
NODE_NAME = "VJOB_NODE_NAME"
"""Variable with the node's name; the supervisor sets it if the run has one node."""
OFFSET = "VJOB_LOCAL_FIRST_NODE_HET_GROUP_"
"""Prefix of the variables with the first node of each component of a het job."""


class Tasks:
    """The running agents of a step."""

    def __init__(self, step: SrunStep) -> None:
        self.step = step
        self.children: list[subprocess.Popen[bytes]] = []
        self.kill_at: float | None = None
        self.kill_wait_s = float(os.environ.get("VJOB_LOCAL_KILL_WAIT_S", "30"))
        """Seconds between SIGTERM and SIGKILL, like Slurm's KillWait."""

    def start(self) -> None:
        first = int(os.environ.get("VJOB_LOCAL_FIRST_NODE", "0"))
        if len(self.step.components) == 1:  # of a het job, perhaps a later part of it alone
            first += int(os.environ.get(f"{OFFSET}{self.step.components[0].het_group}", "0"))
        index = 0
        for component in self.step.components:
            for _ in range(component.nodes):
                env = {
                    **os.environ,
                    "SLURM_NODEID": str(index),
                    "SLURM_PROCID": str(index),
                    "SLURM_LOCALID": "0",
                    NODE_NAME: os.environ.get(NODE_NAME, f"local{first + index}"),
                }
                self.children.append(process.start(component.command, env=env))
                index += 1

    def send(self, number: int, frame: FrameType | None = None) -> None:
        """Pass a signal to the agents; one that ends them also starts the time until SIGKILL."""
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._end()

    def wait(self) -> int:
        """Wait for all tasks; return the highest of their exit codes, as srun does."""
        first_end: float | None = None
        while any(child.poll() is None for child in self.children):
            time.sleep(0.05)
            now = time.monotonic()
            codes = [child.poll() for child in self.children]
            if self.step.kill_on_bad_exit and any(codes) and self.kill_at is None:
                self.send(signal.SIGTERM)
            if any(code == 0 for code in codes) and first_end is None:
                first_end = now
            late = first_end is not None and now > first_end + self.step.wait_s
            if self.step.wait_s and late and self.kill_at is None:
                self.send(signal.SIGTERM)
            if self.kill_at is not None and now > self.kill_at:
                self._kill()
        return max(
            (128 - code if code < 0 else code) for code in (child.wait() for child in self.children)
        )

    def _end(self) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.kill_wait_s

    def _kill(self) -> None:
        for child in self.children:
            if child.poll() is None:
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def run_srun(argv: Sequence[str]) -> int:
    """Start the agents, wait for them, and return srun's exit code."""
    tasks = Tasks(parse_srun(argv))
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), tasks.send)
    tasks.start()
    return tasks.wait()


def run_scontrol(argv: Sequence[str]) -> int:
    """Emulate `scontrol requeue JOB` and `scontrol show hostnames LIST`."""
    if argv[:1] == ["requeue"]:
        Path(os.environ["VJOB_LOCAL_REQUEUE"]).touch(mode=0o600)
        return 0
    if argv[:2] == ["show", "hostnames"]:
        text = argv[2] if len(argv) > 2 else os.environ.get("SLURM_JOB_NODELIST", "")
        print("\n".join(expand_nodes(text)))
        return 0
    print(f"scontrol (local stand-in): {' '.join(argv)} is not supported", file=sys.stderr)
    return 1


def render_stand_ins() -> list[str]:
    """Return shell lines for `render_prologue` that define srun in a local batch script."""
    words = shlex.join(process.build_own_command("-m", STEP, "srun"))
    return [f'srun() {{ exec {words} "$@"; }}  # always in the background']


def main(argv: list[str]) -> int:
    """Run the stand-in that the first argument names."""
    verb = {"srun": run_srun, "scontrol": run_scontrol}[argv[0]]
    return verb(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

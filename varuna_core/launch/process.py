"""Start processes: ssh, or the agent of this machine; no other module of this package does so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from varuna_core.agent.gpu.accelerator import list_variables
from varuna_core.agent.processes.signals import Signals
from varuna_core.launch.errors import LaunchError
from varuna_core.launch.machines import Machine
from varuna_core.launch.ssh import build_ssh_command, keep_ssh_agent
from varuna_core.records.machine import clean_environment

BEAT_S = 5.0
"""Seconds between two signs of life to an agent."""
KEPT_LINES = 20
"""Number of an agent's last lines that are kept."""
TICK_S = 0.2
_READ = 64 * 1024


class Child:
    """A child process with a pipe to its input, whose output is collected as it arrives.

    It runs in a session of its own, so Ctrl-C in the terminal reaches only the parent.
    """

    def __init__(
        self, command: Sequence[str], script: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        self.out = self.err = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self.pid = self._process.pid
        self._input = self._process.stdin
        self._outputs = {"out": self._process.stdout, "err": self._process.stderr}
        for output in self._outputs.values():
            os.set_blocking(output.fileno(), False)
        self.write(script.encode("utf-8", "surrogateescape"))

    @property
    def code(self) -> int | None:
        """Exit code as in Popen; None while the process runs."""
        return self._process.poll()

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # ended; its code will tell
            self._input.write(data)

    def beat(self) -> None:
        """Send a heartbeat, without blocking if the child does not read the pipe."""
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(self._input.fileno(), False)
            os.write(self._input.fileno(), b"\n")

    def let_go(self) -> None:
        """Close the child's input, from which an agent learns that this process is gone."""
        with contextlib.suppress(OSError):
            self._input.close()

    def read(self) -> None:
        """Collect the child's output since the last call."""
        for name, output in self._outputs.items():
            with contextlib.suppress(BlockingIOError):
                while data := os.read(output.fileno(), _READ):
                    setattr(self, name, getattr(self, name) + data)

    def take_lines(self, *, final: bool = False) -> list[str]:
        """Return the lines of both output streams since the last call."""
        self.read()
        lines: list[bytes] = []
        for name in self._outputs:
            *whole, rest = getattr(self, name).split(b"\n")
            lines += [*whole, rest] if final and rest else whole
            setattr(self, name, b"" if final else rest)
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process if it still runs, and close all its pipes."""
        if self.code is None:
            self.kill()
            self._process.wait()
        self.let_go()
        for output in self._outputs.values():
            output.close()


def start_on(
    machine: Machine,
    ssh_config: str | None,
    here: Sequence[str],
    script: str,
    more: Mapping[str, str] | None = None,
) -> Child:
    """Run the command `here` on this machine, with variables `more`, or ssh to another machine;
    both get `script` as standard input."""
    if machine.is_local:
        return Child(here, script, {**local_environment(os.environ), **(more or {})})
    command = build_ssh_command(machine, ssh_config)
    return Child(command, script, {**clean_environment(os.environ), **keep_ssh_agent(os.environ)})


def local_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent on this machine: the variables that ssh would pass on, and
    those that select this user's GPUs."""
    names = list_variables()
    return {**clean_environment(environ), **{n: environ[n] for n in names if n in environ}}


def log_line(line: str) -> None:
    """Print a line on standard error, which is the run's scheduler.out."""
    with contextlib.suppress(OSError):  # a full disk must not end the run
        print(line, file=sys.stderr, flush=True)


def wait_all(children: Sequence[Child], signals: Signals, timeout_s: float) -> None:
    """Wait until all children have ended, the time is over, or a signal arrives; kill the rest."""
    for child in children:
        child.let_go()
    deadline = time.monotonic() + timeout_s
    while any(child.code is None for child in children):
        if signals.ending is not None or time.monotonic() > deadline:
            break
        signals.wait(TICK_S)
        for child in children:
            child.read()
    for child in children:
        if child.code is None:
            child.kill()
        child.read()

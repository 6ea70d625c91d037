"""A user's session: types `vjob` commands and checks what they print."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 1.0
COMMAND_S = 150.0
LONG = 500
_ESCAPES = re.compile(rb"\x1b(\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[()].|[=>78cM])")


class WalkthroughFailed(AssertionError):
    """The output that the walkthrough promises was not seen."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command, or one wait, and its time."""

    part: str
    command: str
    took_s: float
    saw: str
    """The first line that was looked for."""


@dataclass(kw_only=True)
class Session:
    """A folder, an environment, and the steps done so far."""

    folder: Path
    env: Mapping[str, str]
    vjob: Sequence[str]
    """The command: `vjob` of a venv, or the tree's own."""
    part: str = ""
    steps: list[Step] = field(default_factory=list)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def run(
        self,
        command: str,
        sees: str,
        *,
        code: int | None = 0,
        shows: str | None = None,
        without: Sequence[str] = (),
    ) -> str:
        """Run a `vjob` command; `sees` is a pattern of a line that it must print.

        `shows` is the command for the table, `without` are variables that are not there.
        """
        env = {name: value for name, value in self.env.items() if name not in without}
        start = time.monotonic()
        done = subprocess.run(
            [*self.vjob, *shlex.split(command)],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        said = done.stdout + done.stderr
        line = find_line(said, sees)
        if line is None or code not in (None, done.returncode) or "Traceback (most" in done.stderr:
            raise WalkthroughFailed(
                f"vjob {command}: exit code {done.returncode}, not {code}; or no {sees!r} in\n"
                f"{said}"
            )
        self.note(shows or f"`vjob {command}`", start, line)
        return done.stdout

    def wait_for(self, job: str, sees: str, timeout_s: float) -> str:
        """Repeat `vjob status` until it prints the pattern."""
        start = time.monotonic()
        said = ""
        while time.monotonic() - start < timeout_s:
            done = subprocess.run(
                [*self.vjob, "status", job, "--once"],
                cwd=self.folder,
                env=dict(self.env),
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            said = done.stdout + done.stderr
            line = find_line(said, sees)
            if line is not None:
                self.note(f"(until `vjob status {job}` says so)", start, line)
                return said
            time.sleep(LOOK_S)
        raise WalkthroughFailed(f"not within {timeout_s:g} s: {sees!r} in\n{said}")

    def watch_screen(self, job: str, sees: str, *, columns: int = 80, lines: int = 24) -> None:
        """Open the live screen on a terminal of that size, and leave it with `q`."""
        start = time.monotonic()
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(self.folder)
            words = [*self.vjob, "status", job]
            os.execvpe(words[0], words, {**self.env, "TERM": "xterm-256color"})
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        drawn, found = b"", None
        while found is None and time.monotonic() - start < COMMAND_S:
            if not select.select([terminal], [], [], LOOK_S)[0]:
                continue
            try:
                drawn += os.read(terminal, 65536)
            except OSError:  # it has ended
                break
            found = re.search(sees, _ESCAPES.sub(b" ", drawn).decode(errors="replace"))
        _leave(child, terminal)
        if found is None:
            text = _ESCAPES.sub(b" ", drawn).decode(errors="replace")
            raise WalkthroughFailed(f"no {sees!r} on the screen of {job}: {text[-3000:]}")
        self.note(f"`vjob status {job}`", start, f"{columns}x{lines}: {found.group()}")

    def note(self, command: str, start: float, saw: str) -> None:
        """Record a step that began at `start`."""
        took_s = time.monotonic() - start
        self.steps.append(Step(part=self.part, command=command, took_s=took_s, saw=saw.strip()))
        print(f"{took_s:7.1f} s  {command}: {saw.strip()[:100]}", flush=True)


def find_line(text: str, pattern: str) -> str | None:
    """Find the first line with the pattern; of a very long one, such as JSON, the match alone."""
    for line in text.splitlines():
        if found := re.search(pattern, line):
            return line if len(line) < LONG else found.group()
    return None


def _leave(child: int, terminal: int) -> None:
    """Press q and read to the end: a terminal that nobody reads blocks its writer."""
    try:
        os.write(terminal, b"q")
        while select.select([terminal], [], [], COMMAND_S)[0] and os.read(terminal, 65536):
            pass
    except OSError:
        pass
    os.close(terminal)
    os.waitpid(child, 0)

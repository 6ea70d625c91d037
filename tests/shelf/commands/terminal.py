"""Terminals for tests: commands in a pty of any size, and screens at the end of a slow line.

`CommandOffice` starts one process that has imported the commands, and forks it for each call: a
hundred calls on real terminals cost seconds. `tmux` is the terminal emulator that screens are read
from; between it and the screen stands `SlowLine`, as ssh would on a bad day.

    tmux pane ── keys, 200 ms late ──► slow line ──► pty of `vjob status`
              ◄── 1 kB/s, 200 ms late ──          ◄──
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
HEAVY = ("vjob.shelf.commands.cli", "vjob.jobs.monitor.readers.run", "vjob.jobs.reporting.report")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a command printed: all of it on a terminal, where both streams are one."""

    code: int
    text: str
    errors: str = ""
    """Standard error of a command whose output is piped."""

    @property
    def lines(self) -> list[str]:
        """As a terminal shows them: without escape codes, and of a line that is drawn again its
        last form."""
        plain = ESCAPE.sub("", self.text.replace("\r\n", "\n"))
        return [line.rpartition("\r")[2] for line in plain.split("\n")]

    @property
    def words(self) -> list[str]:
        return " ".join(self.lines).split()


def measure(line: str) -> int:
    """Columns that a line takes."""
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in line)
    return len(line) + wide - sum(map(bool, map(unicodedata.combining, line)))


class CommandOffice:
    """Runs `vjob` on terminals; in a folder and with an environment of its own."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.shelf.commands.terminal"]
        self._process = subprocess.Popen(
            command, cwd=folder, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def ask(self, *words: str, columns: int | None, **env: str) -> Said:
        """Run a command on a terminal of so many columns, or with its output piped."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"words": words, "columns": columns, "env": env}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Said(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


def set_size(fd: int, columns: int, lines: int = 24) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def serve() -> None:
    """One request a line on standard input, one answer a line on standard output."""
    for name in HEAVY:
        __import__(name)
    answers = os.fdopen(os.dup(1), "w")
    for text in sys.stdin:
        request = json.loads(text)
        answers.write(json.dumps(vars(run_forked(**request))) + "\n")
        answers.flush()


def run_forked(words: Sequence[str], columns: int | None, env: Mapping[str, str]) -> Said:
    """The command in a fork of this process; its first stream is a terminal or empty."""
    ends = [os.openpty()] if columns else [os.pipe(), os.pipe()]
    if columns:
        set_size(ends[0][1], columns)
    child = os.fork()
    if child == 0:
        _become(words, [pair[1] for pair in ends], env)
    for _, written in ends:
        os.close(written)
    texts = read_all([read for read, _ in ends])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Said(code=code, text=texts[0], errors="".join(texts[1:]))


def _become(words: Sequence[str], outs: Sequence[int], env: Mapping[str, str]) -> None:
    """In the fork: `vjob` with these streams; never returns."""
    code = 70
    try:
        os.setsid()
        is_terminal = len(outs) == 1
        os.dup2(outs[0] if is_terminal else os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(outs[0], 1)
        os.dup2(outs[-1], 2)
        if is_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.environ.update(env)
        from vjob.shelf.commands.cli import main

        sys.argv = ["vjob", *words]
        try:
            main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1 if error.code else 0
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def read_all(files: Sequence[int]) -> list[str]:
    """What comes out of all of them, to the end."""
    found = {file: b"" for file in files}
    is_open = set(files)
    while is_open:
        for file in select.select(list(is_open), [], [])[0]:
            try:
                piece = os.read(file, 65536)
            except OSError:  # EIO: the last holder of the terminal is gone
                piece = b""
            found[file] += piece
            if not piece:
                is_open.discard(file)
                os.close(file)
    return [text.decode(errors="replace") for text in found.values()]


class Pane:
    """A pane of a tmux of its own: a real terminal emulator that runs a command."""

    def __init__(self, folder: Path, env: Mapping[str, str], command: str, size: str) -> None:
        self._socket = str(folder / "tmux")
        columns, lines = size.split("x")
        self._call("-f", "/dev/null", "new-session", "-d", "-x", columns, "-y", lines, command,
                   env=env)  # fmt: skip

    def _call(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        command = ["tmux", "-S", self._socket, *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def press(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def read(self) -> str:
        return self._call("capture-pane", "-p")

    def ask(self, form: str) -> str:
        """A fact such as `#{alternate_on}`."""
        return self._call("display-message", "-p", form).strip()

    def close(self) -> None:
        self._call("kill-server")


BYTES_PER_S = 1000
DELAY_S = 0.2


def run_slowly(log: Path, command: Sequence[str]) -> int:
    """Run a command at the end of a slow line: what it writes comes at 1 kB/s, and both ways are
    late. `log` has its pid, the time and size of each piece that it wrote, and its exit code."""
    import pty
    import time
    import tty

    child, far = pty.fork()
    if child == 0:
        os.execvp(command[0], list(command))
    size = os.get_terminal_size(0)
    set_size(far, size.columns, size.lines)
    before = termios.tcgetattr(0)
    tty.setraw(0)
    out: list[tuple[float, bytes]] = []
    keys: list[tuple[float, bytes]] = []
    budget, last, is_open = 0.0, time.monotonic(), True
    with log.open("a") as handle:
        handle.write(f"pid {child}\n")
        handle.flush()
        while is_open or out:
            files = [0, far] if is_open else []
            ready = select.select(files, [], [], 0.02)[0]
            now = time.monotonic()
            budget, last = min(BYTES_PER_S * DELAY_S, budget + BYTES_PER_S * (now - last)), now
            if far in ready:
                try:
                    piece = os.read(far, 4096)
                except OSError:
                    piece = b""
                is_open = bool(piece)
                if piece:
                    out.append((now + DELAY_S, piece))
                    handle.write(f"{now} {len(piece)}\n")
                    handle.flush()
            if 0 in ready:
                keys.append((now + DELAY_S, os.read(0, 4096)))
            while keys and keys[0][0] <= now:
                os.write(far, keys.pop(0)[1])
            while out and out[0][0] <= now and budget >= 1:
                due, piece = out.pop(0)
                part = piece[: int(budget)]
                os.write(1, part)
                budget -= len(part)
                if piece[len(part) :]:
                    out.insert(0, (due, piece[len(part) :]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        handle.write(f"code {code}\n")
    termios.tcsetattr(0, termios.TCSADRAIN, before)
    return code


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(run_slowly(Path(sys.argv[1]), sys.argv[2:]))
    serve()

"""Processor time of the live screen of `vjob status` while nobody presses a key.

    python -m benchmarks.commands.status_screen [--seconds 60] [--write]

The whole command runs in a real pseudo-terminal over the logs of a job of 64 nodes: readers, judge
and screen. Its processor time is set against the time that passes, first with nothing new in any
file, then with one new line a node and refresh, the merged log in sight.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import RESULTS, ROOT

RESULT = RESULTS / "status_screen.md"
NUM_NODES = 64
INTERVAL_S = 2.0
SETTLE_S = 10.0
"""Start-up, which is not what is measured."""
COLUMNS, LINES = 120, 36
BOUND = 0.03
ITERATION = (
    "{rank}:  iteration {step:8d}/   10000 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): 2301.4 | learning rate: 1.5E-04 | global batch size:    64 | lm loss: "
    "{loss:.6E} | loss scale: 262144.0 | grad norm: 2.932 | number of skipped iterations:   0 |\n"
)
GPUS = "".join(f"[{gpu}] NVIDIA A10 | 66'C, 97 % | 18021 / 23028 MB | \n" for gpu in range(4))


class Job:
    """The logs of a job, to which lines can be added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = 0
        for node in range(NUM_NODES):
            name = folder / f"n{node:03d}"
            name.with_suffix(".err").write_text("UserWarning: this is only a warning\n" * 5)
            name.with_suffix(".gpu").write_text(GPUS)
        for _ in range(200):
            self.go_on()

    def go_on(self) -> None:
        """One more line a node."""
        self._step += 1
        for node in range(NUM_NODES):
            line = ITERATION.format(
                rank=4 * node, step=self._step, samples=64 * self._step, loss=9 - self._step / 1000
            )
            with (self._folder / f"n{node:03d}.out").open("a") as handle:
                handle.write(line)


class Terminal:
    """The command in a terminal of its own; counts what is drawn."""

    def __init__(self, folder: Path, env: Mapping[str, str] = os.environ) -> None:
        self.num_bytes = 0
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._master = master
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vjob", "status", str(folder), "--interval", str(INTERVAL_S)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**env, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        os.close(slave)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:
                return
            self.num_bytes += len(data)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all threads of the command, so far."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> int:
        self.press("q")
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            raise


def measure(terminal: Terminal, seconds: float, each: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds a second, and bytes drawn a refresh."""
    begun, cpu, drawn = time.monotonic(), terminal.cpu_s, terminal.num_bytes
    while time.monotonic() - begun < seconds:
        each()
        time.sleep(INTERVAL_S)
    took = time.monotonic() - begun
    return (terminal.cpu_s - cpu) / took, (terminal.num_bytes - drawn) / (took / INTERVAL_S)


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder)
        terminal = Terminal(folder)
        time.sleep(SETTLE_S)
        start_s = terminal.cpu_s
        quiet, quiet_bytes = measure(terminal, options.seconds, lambda: None)
        terminal.press("a")
        time.sleep(2 * INTERVAL_S)
        busy, busy_bytes = measure(terminal, options.seconds, job.go_on)
        code = terminal.close()
    lines = [
        f"Python {platform.python_version()}, {platform.machine()}, {NUM_NODES} nodes, a refresh "
        f"every {INTERVAL_S:.0f} s, {COLUMNS}x{LINES}, {options.seconds:.0f} s each.",
        "",
        "| what | bound | processor seconds a second | bytes drawn a refresh |",
        "|---|---|---|---|",
        f"| nothing new | {BOUND} | {quiet:.4f} | {quiet_bytes:,.0f} |",
        f"| a line a node and refresh, all shown | | {busy:.4f} | {busy_bytes:,.0f} |",
        "",
        f"The start took {start_s:.1f} processor seconds. The screen was left with q, and the exit "
        f"code was {code}.",
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        RESULT.write_text(
            "# The live screen: what looking costs\n\n"
            f"Made by `python -m benchmarks.commands.status_screen --write`. {text}\n"
        )


if __name__ == "__main__":
    main()

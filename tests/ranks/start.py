"""Starts the ranks of a test as processes, waits for them with a deadline, ends what is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.ranks.process_pool import Order

DEADLINE_S = 800.0
"""Bounds a hang on a machine that is busy with something else."""

OWN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
ENVIRONMENTS = {
    # Asked through NVML, `torch.cuda.is_available` makes no context that forks could not use.
    "ranks": {**OWN_ENVIRONMENT, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    "commands": {},
    # Without the threads that numpy and pyarrow would begin.
    "reports": {**OWN_ENVIRONMENT, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
    "scripts": OWN_ENVIRONMENT,
}
"""Of each pool."""
_ordering = threading.Lock()


class Rank:
    """A process that the pool forked."""

    def __init__(self, pid: int, end: int, output: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end, self._output, self._said = end, output, b""

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        if self.returncode is None:
            self._look(self._end, timeout_s)
            code = os.read(self._end, 16)
            os.close(self._end)
            self.returncode = int(code) if code else -signal.SIGKILL  # the pool itself ended
        return self.returncode

    def read_line(self, timeout_s: float = DEADLINE_S) -> str:
        """The next line of its output; empty at the end."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._said and self._read(deadline):
            pass
        line, newline, self._said = self._said.partition(b"\n")
        return (line + newline).decode(errors="replace")

    def read_rest(self, timeout_s: float | None = None) -> str:
        """All of its output that was not read, when it and whatever it started are over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._read(deadline):
            pass
        said, self._said = self._said, b""
        return said.decode(errors="replace")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def close(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()
        os.close(self._output)

    def _read(self, deadline: float | None) -> bool:
        self._look(self._output, None if deadline is None else deadline - time.monotonic())
        more = os.read(self._output, 1 << 16)
        self._said += more
        return bool(more)

    def _look(self, descriptor: int, timeout_s: float | None) -> None:
        ready = select.poll()  # `select` knows none beyond 1023
        ready.register(descriptor, select.POLLIN)
        if not ready.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000):
            raise subprocess.TimeoutExpired([f"rank {self.pid}"], timeout_s or 0.0)


@cache
def open_pool(
    of: str, python: str = sys.executable
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """It ends by itself when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [python, "-m", "tests.ranks.process_pool", str(theirs.fileno()), of],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENTS[of]},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return ours, process


def fork(
    of: str, order: Order, output: int, errors: int, python: str = sys.executable
) -> tuple[int, int]:
    """The process that a pool forks for an order, and where its exit code will be read."""
    end, reported = os.pipe()
    with _ordering:
        pool, _ = open_pool(of, python)  # once, whichever thread is the first
        socket.send_fds(pool, [json.dumps(asdict(order)).encode()], [output, errors, reported])
        answer = pool.recv(16)
    os.close(reported)
    if not answer:
        raise RuntimeError(f"the pool of {of} ended; what it said stands above")
    return int(answer), end


def build_order(
    module: str, words: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT
) -> Order:
    return Order(
        module=module,
        arguments=list(words),
        environment=dict(environment),
        folder=str(folder),
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
    )


def start_rank(order: Order, of: str = "ranks", python: str = sys.executable) -> Rank:
    output, written = os.pipe()
    pid, end = fork(of, order, written, written, python)
    os.close(written)
    return Rank(pid, end, output)


@contextmanager
def start_ranks(module: str, world_size: int, *arguments: str) -> Iterator[list[Rank]]:
    """As `python -m <module> <arguments> <rank> <world size>`, a process a rank."""
    environment = {**os.environ, **OWN_ENVIRONMENT}
    ranks: list[Rank] = []
    try:
        for rank in range(world_size):
            words = [*arguments, str(rank), str(world_size)]
            ranks.append(start_rank(build_order(module, words, environment)))
        yield ranks
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
        for process in ranks:
            process.close()


def collect(ranks: Sequence[Rank], timeout_s: float = DEADLINE_S) -> list[tuple[int, str]]:
    """Exit code and the rest of the output of each rank."""
    deadline = time.monotonic() + timeout_s
    done = []
    for rank in ranks:
        said = rank.read_rest(max(0.1, deadline - time.monotonic()))
        done.append((rank.wait(max(0.1, deadline - time.monotonic())), said))
    return done


def find_problems(ranks: Sequence[Rank]) -> str:
    """What went wrong, if anything; also that they did not end, so that a caller that keeps the
    answer waits for that once."""
    try:
        done = collect(ranks)
    except subprocess.TimeoutExpired as error:
        return str(error)
    return "\n".join(f"rank {r} exit {code}\n{out}" for r, (code, out) in enumerate(done) if code)

"""Ranks that save a made-up state, forked from one process that has loaded torch.

    python -m tests.ranks.checkpoint_world

reads a JSON line for each job, forks its ranks, prints their pids, and when they have ended their
exit codes and what they said. No torch.distributed: what ranks share is the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import ROOT
from varuna_core.checkpoint.format.entries import CheckpointPart, Entry, deal, make_entry
from varuna_core.checkpoint.format.manifest import TrainingState
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.torch_state import take_state
from varuna_core.checkpoint.store.writer import CheckpointWriter

SHARED_MEMORY = Path("/dev/shm")
IN_MEMORY = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
"""Where a sync takes no time, for tests that save hundreds of times."""

NUM_SEGMENTS = 4
SHAPES = {
    "a.weight": (17, 24),
    "a.bias": (24,),
    "b.weight": (40, 8, 3),
    "b.scale": (),
    "c.weight": (64, 33),
    "c.empty": (0, 5),
    "d.weight": (24, 17),
    "d.bias": (17,),
}
"""Two a segment; d.tied is a.weight once more."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of a world do."""

    store: str
    job: str
    iterations: list[int]
    stages: int = 1
    replicas: int = 1
    shard: bool = False
    line: str | None = None
    keep: int | None = None
    background: bool = False
    scale: int = 1
    """Makes the tensors so many times longer."""
    strace: str = ""
    """Injected into the system calls of rank 0, as strace has it."""


def make_tensor(name: str, key: str, iteration: int, scale: int = 1) -> Tensor:
    shape = SHAPES[name]
    if shape:
        shape = (shape[0] * scale, *shape[1:])
    generator = torch.Generator().manual_seed(hash_name(f"{name}/{key}/{iteration}"))
    return torch.randn(shape, generator=generator)


def hash_name(text: str) -> int:
    return int.from_bytes(text.encode()[-12:].rjust(12), "big") % (1 << 60)


def make_state(job: Job, iteration: int) -> TrainingState:
    shapes = {name: tuple(make_tensor(name, "w", iteration, job.scale).shape) for name in SHAPES}
    shapes["d.tied"] = shapes["a.weight"]
    return TrainingState(
        partition=f"{job.stages} stages",
        shapes=shapes,
        ties=[["a.weight", "d.tied"]],
        loss_scale={"scale": 2.0**20, "good": 7},
        data_position=iteration * 8,
        user={"iteration": iteration, "best": float("inf")},
    )


def make_part(job: Job, rank: int, iteration: int) -> CheckpointPart:
    """Stage rank % stages, replica rank // stages; all replicas hold the same."""
    stage, replica = rank % job.stages, rank // job.stages
    held = range(NUM_SEGMENTS * stage // job.stages, NUM_SEGMENTS * (stage + 1) // job.stages)
    segments: dict[int, list[Entry]] = {}
    optimizer = {}
    for segment in held:
        for name in list(SHAPES)[2 * segment : 2 * segment + 2]:
            weight = make_tensor(name, "w", iteration, job.scale)
            state = {"step": torch.tensor(float(iteration)), "lr": 0.5}
            state["exp_avg"] = make_tensor(name, "m", iteration, job.scale)
            entries, optimizer[name] = take_state(name, weight, state)
            segments.setdefault(segment, []).append(make_entry("weight", name, weight))
            segments[segment] += entries
    if job.shard:
        segments = deal(segments, job.replicas, replica)
    elif replica:
        segments, optimizer = {}, {}
    return CheckpointPart(
        iteration=iteration,
        segments=segments,
        shared=job.shard,
        optimizer=optimizer,
        own={"rank": rank},
        state=make_state(job, iteration) if rank == 0 else None,
    )


def save_all(job: Job, rank: int) -> None:
    writer = CheckpointWriter(
        job.store,
        job=job.job,
        rank=rank,
        world_size=job.stages * job.replicas,
        line=job.line,
        keep=job.keep,
        background=job.background,
    )
    for iteration in job.iterations:
        writer.save(make_part(job, rank, iteration))
    writer.close()


def expect_state(reader: CheckpointReader, scale: int = 1) -> None:
    """What was saved for its iteration, every bit."""
    iteration = reader.iteration
    for name in SHAPES:
        assert torch.equal(reader.read(name), make_tensor(name, "w", iteration, scale)), name
        state = reader.read_optimizer(name)
        assert state["step"] == iteration and state["lr"] == 0.5
        assert torch.equal(state["exp_avg"], make_tensor(name, "m", iteration, scale)), name
    assert torch.equal(reader.read("d.tied"), reader.read("a.weight"))
    assert reader.state.user == {"iteration": iteration, "best": float("inf")}


class World:
    """The process that forks, seen from a test."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.checkpoint_world"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, job: Job) -> list[int]:
        """The ranks' pids."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        pids: list[int] = self._hear()
        return pids

    def finish(self) -> list[tuple[int, str]]:
        """Exit code, or minus the signal, and what the rank said, of each."""
        return [(code, said) for code, said in self._hear()]

    def run(self, job: Job) -> list[tuple[int, str]]:
        self.start(job)
        return self.finish()

    def _hear(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the world has ended"
        return json.loads(line)


@contextmanager
def open_world() -> Iterator[World]:
    world = World()
    try:
        yield world
    finally:
        assert world.process.stdin and world.process.stdout
        world.process.stdin.close()
        world.process.wait(timeout=30)
        world.process.stdout.close()


def run_rank(job: Job, rank: int, said: int) -> None:
    """In the child; never returns."""
    code = 0
    try:
        tracer = trace_self(job.strace) if job.strace and rank == 0 else None
        save_all(job, rank)
        if tracer is not None:
            tracer.kill()
    except Exception as error:
        os.write(said, f"{type(error).__name__}: {error}"[:4000].encode())
        code = 1
    os._exit(code)


def trace_self(inject: str) -> subprocess.Popen[bytes]:
    """strace on this process, once it is there."""
    command = ["strace", "-f", "-o", "/dev/null", "-e", f"inject={inject}", "-p", str(os.getpid())]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    status = Path("/proc/self/status")
    while "TracerPid:\t0" in status.read_text():
        if tracer.poll() is not None:
            raise RuntimeError("strace could not attach")
        time.sleep(0.001)
    return tracer


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        children = []
        for rank in range(job.stages * job.replicas):
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                run_rank(job, rank, write)
            os.close(write)
            children.append((pid, read))
        print(json.dumps([pid for pid, _ in children]), flush=True)
        ends = []
        for pid, read in children:
            with os.fdopen(read) as said:
                text = said.read()
            ends.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text))
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    main()

"""Faults that the programs of this folder do to themselves, and the samples that they train on.

FAULT is `name:rank:step`; it strikes in the first attempt only.
"""

import ctypes
import json
import os
import pdb
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FAULT, ODD, AT = (os.environ.get("FAULT", "") + "::").split(":")[:3]
KIND = os.environ.get("KIND", "ddp")
STEPS, PACE_S = int(os.environ["STEPS"]), 0.3
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH = int(os.environ.get("BATCH", 32 * WORLD))
"""Samples of all ranks in a step."""
SAVED = Path(os.environ["VJOB_RUN"]) / "saved"
SPIN = "import time; t = time.time()\nwhile time.time() - t < 170: pass"
TRACE = """
import ctypes, os, sys, time
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
assert libc.ptrace(16, pid, None, None) == 0
os.waitpid(pid, 0x40000000)
time.sleep(100)
assert libc.ptrace(17, pid, None, None) == 0
"""
IS_FIRST = os.environ["VJOB_ATTEMPT"] == "0" or "AGAIN" in os.environ
DATA, HOLD = os.environ.get("DATA", os.__file__), Path(os.environ.get("HOLD", "/nowhere"))
"""The file of all samples; while HOLD exists, it cannot be read (held_mount.py)."""
RELAY = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as ear:
    print(ear.getsockname()[1], flush=True)
    ends = [ear.accept()[0] for _ in range(2)]
ends[1].sendall(ends[0].recv(64))  # the first message passes, the answer to it does not
time.sleep(10_000)
"""
if not IS_FIRST:
    HOLD.unlink(missing_ok=True)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Bytes of this very interpreter's library, so that a loss depends on what was read."""

    def __init__(self) -> None:
        self.fd = os.open(DATA, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if IS_FIRST and index == int(AT or 0) * BATCH + int(ODD or 0):
            if FAULT == "worker":
                time.sleep(10_000)
            if FAULT == "worker-dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT == "worker-stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
        text = os.pread(self.fd, 64, index * 7 % (self.size - 64))
        return torch.tensor(list(text), dtype=torch.float32) / 256


def build_loader(begun: int) -> "torch.utils.data.DataLoader[torch.Tensor]":
    """This rank's batches of all steps after `begun`."""
    share, size = range(begun * BATCH + RANK, STEPS * BATCH, WORLD), BATCH // WORLD
    num_workers = 1 if FAULT.startswith("worker") else 0
    return torch.utils.data.DataLoader(Samples(), size, sampler=share, num_workers=num_workers)


def build_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))


def tell(step: int, loss: torch.Tensor) -> None:
    """The line of a step that has been done."""
    if RANK == 0:
        print(f"step {step}/{STEPS} loss {loss.item():.9f}", flush=True)
    time.sleep(PACE_S)


def tell_end(module: Any) -> None:
    """The loss on the same samples, however many ranks trained."""
    sample = torch.stack([Samples()[index] for index in range(256)])
    with torch.no_grad():
        print(f"end loss {(module(sample) - sample).pow(2).mean().item():.9f}", flush=True)


def strike_early(when: str) -> None:
    """A rank that never joins, or never has its data."""
    if IS_FIRST and when == FAULT and int(ODD) == RANK:
        os.read(os.pipe()[0], 1)


def compute_for(seconds: float, compute: Any) -> None:
    """Use a tenth of a core, which is no less busy to the guard than all of it; on a machine that
    is too busy for it, less, but never a long sleep."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.thread_time()
        compute()
        time.sleep(min(9 * (time.thread_time() - begun), 5.0))


def measure_edits() -> int:
    """The edit distance of two texts, in Python alone."""
    one, other = (os.pread(Samples().fd, 400, at) for at in (0, 1000))
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one):
        before, row[0] = row[0], at + 1
        for to, mark in enumerate(other):
            before, row[to + 1] = (
                row[to + 1],
                min(row[to + 1] + 1, row[to] + 1, before + (letter != mark)),
            )
    return row[-1]


def disturb(name: str, seconds: float, compute: Any) -> None:
    """Do something that healthy ranks do, too: a word of benchmarks/hangs/healthy.py."""
    if name in ("compile", "evaluate", "python"):
        compute_for(seconds, measure_edits if name == "python" else compute)
    if name == "save":
        with open(SAVED.with_suffix(f".{RANK}.part"), "wb") as sink:
            for _ in range(int(seconds * 2)):
                sink.write(b"x" * (1 << 18))
                sink.flush()
                time.sleep(0.5)
        os.unlink(sink.name)
    if name in ("data", "sleep"):
        time.sleep(seconds)
    if name == "storage":  # a read that ends once the server is back
        ear, mouth = os.pipe()
        threading.Timer(seconds, os.write, (mouth, b"x")).start()
        os.read(ear, 1)
    if name == "stopped":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if name == "debugger":
        script = TRACE.replace("sleep(100)", f"sleep({seconds})")
        subprocess.run([sys.executable, "-c", script, str(os.getpid())], check=True)
    if name == "child":
        subprocess.run(["sleep", str(seconds)], check=True)


def cut_link(is_odd: bool) -> None:
    """Exchange a message with another rank through a relay that passes the first one alone."""
    port = torch.zeros(1, dtype=torch.int64)
    if RANK == 0:
        relay = subprocess.Popen([sys.executable, "-c", RELAY], text=True, stdout=subprocess.PIPE)
        assert relay.stdout is not None
        port[0] = int(relay.stdout.readline())
    dist.broadcast(port, src=0)
    if is_odd:
        dist.barrier()
    with socket.create_connection(("127.0.0.1", int(port))) as link:
        if not is_odd:
            dist.barrier()  # so that the other one is the second end
            link.sendall(b"a question")
        link.recv(64)
        if is_odd:
            link.sendall(b"an answer")
            link.recv(64)


def strike(step: int, compute: Any) -> None:
    """Do what is to happen before this step of the first attempt."""
    for at, name, rank, seconds in json.loads(os.environ.get("DISTURB", "[]")):
        if step == at and rank in (RANK, -1):
            disturb(name, seconds, compute)
    if not (IS_FIRST and AT and step == int(AT)):
        return
    is_odd = int(ODD) == RANK
    if (FAULT == "sigstop" and is_odd) or FAULT == "sigstop-all":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "mismatch":
        dist.barrier() if is_odd else dist.all_reduce(torch.ones(3))
    if FAULT == "broadcast":
        dist.broadcast(torch.ones(3), src=RANK) if is_odd else dist.all_reduce(torch.ones(3))
    if FAULT == "barrier" and not is_odd:
        dist.barrier()
    if FAULT == "sleep" and is_odd:
        time.sleep(10_000)
    if FAULT == "pipe" and is_odd:
        os.read(os.pipe()[0], 1)
    if FAULT == "group":
        group = dist.new_group(list(range(WORLD)))
        dist.all_reduce(torch.ones(1), group=group if is_odd else None)
    if FAULT == "cut":
        cut_link(is_odd)
    if FAULT in ("nfs", "nfs-all"):
        dist.barrier()  # all have this step's samples
    if FAULT in ("nfs", "nfs-all", "nfs-pause") and is_odd:
        HOLD.touch()
        if FAULT == "nfs":
            os.pread(os.open(DATA, os.O_RDONLY), 64, 0)
        if FAULT == "nfs-pause":
            threading.Timer(60, HOLD.unlink).start()
    # A call into a driver that never returns, as of a GPU that fell off.
    if FAULT == "native" and is_odd:
        ctypes.CDLL(None).sleep(10_000)
    if FAULT == "native-held" and is_odd:  # no other thread of the interpreter runs
        ctypes.PyDLL(None).sleep(10_000)
    if FAULT == "spin" and is_odd:
        while True:
            pass
    if FAULT == "thread" and is_odd:  # a lock of its own that nobody gives back
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    # Healthy ones.
    if FAULT == "prompt" and is_odd:
        ear, mouth = os.pipe()
        threading.Timer(170, os.write, (mouth, b"continue\n")).start()
        pdb.Pdb(stdin=os.fdopen(ear), stdout=sys.stdout).set_trace()
    if FAULT == "child" and is_odd:
        subprocess.run([sys.executable, "-c", SPIN], check=True)
    if FAULT == "write" and is_odd:
        with open("/dev/null", "wb") as sink:
            for _ in range(340):
                sink.write(b"x" * (1 << 20))
                time.sleep(0.5)

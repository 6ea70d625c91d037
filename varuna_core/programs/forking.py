"""Fork the ranks of a node from one process that has imported torch once (`--fork`).

Only imports precede the fork: no thread of ours, no CUDA, no process group. If an import has
started a thread or opened a GPU, forked processes would be broken, and each rank starts in the
usual way. The agent (varuna_core/agent/setup/forked_ranks.py) sends each rank's environment on
standard input, and becomes the ranks' parent when this process ends.

With `--standby` the imports start before the agent sends anything. They run beside a training, in a
thread of niceness 10: on Linux niceness belongs to a thread, and cannot be lowered again without
privileges, so the importing thread is not the one that trains later.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_core.agent.gpu.names import DEVICE_FILES

NICE = 10
"""Niceness that leaves a tenth of a busy processor; at 19 the imports would never finish."""
# The dry run loads symbolic_shapes and tensor, the optimizers and the meta device torch._dynamo, at
# first use: half of all that is imported. Where nothing is compiled dynamo.py stands in for it.
MODULES = (
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch._dynamo",
    "varuna_core.data.errors",
    "varuna_core.planner.profile.errors",
    "varuna_core.runtime.saving.preemption",
    "varuna_core.programs.place",
    "varuna_core.programs.training",
)
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER, _ANY = 0x59616D61, -1
_LOOK_S = 0.001


def fork_ranks(*, is_early: bool = False) -> list[str]:
    """Fork the ranks. In each rank, return its command line arguments; this process exits.

    With `is_early`, import modules before the agent's task arrives on standard input.
    """
    report = os.dup(1)
    os.dup2(2, 1)  # for what modules print as they are imported
    initial = dict(os.environb)
    importing = threading.Thread(target=_import_quietly, name="imports", daemon=True)
    if is_early:
        importing.start()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    task = json.loads(line)
    importing.join() if is_early else import_all()
    is_broken = threading.active_count() > 1 or holds_gpu(Path("/proc/self/fd"))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.freeze()  # so that no rank writes into what all of them share
    origin = os.getpid()
    for rank in task["ranks"]:
        ready, done = os.pipe()
        pid = os.fork()
        if not pid:
            os.setsid()
            for end in (ready, done, report):
                os.close(end)
            _become(rank, task, origin, initial)
            program = sys.orig_argv[1 : 1 - len(sys.argv)]
            arguments: list[str] = task["arguments"]
            if is_broken:
                os.execv(sys.executable, [sys.executable, *program, *arguments])
            sys.argv[1:] = arguments
            return arguments
        os.close(done)
        os.read(ready, 1)  # it has a session of its own: the agent ends what is left of ours
        os.close(ready)
        os.write(report, b"%d\n" % pid)
    os._exit(0)


def holds_gpu(open_files: Path) -> bool:
    """Return True if this process has a GPU device open: CUDA's state does not survive a fork."""
    for file in open_files.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(file).startswith(DEVICE_FILES):
                return True
    return False


def _become(
    rank: Mapping[str, Any], task: Mapping[str, Any], origin: int, initial: Mapping[bytes, bytes]
) -> None:
    os.dup2(rank["out"], 1)
    os.dup2(rank["err"], 2)
    for each in task["ranks"]:
        os.close(each["out"])
        os.close(each["err"])
    forget_input()
    take_environment(rank["env"], initial)
    while os.getppid() == origin:
        time.sleep(_LOOK_S)
    # As the agent does it for ranks that it starts itself; neither outlives a fork.
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    prctl(_PR_SET_PTRACER, _ANY)
    if os.getppid() != task["agent"]:
        os._exit(128 + signal.SIGKILL)


def take_environment(given: Mapping[str, str], initial: Mapping[bytes, bytes]) -> None:
    """Set the environment of a rank, but keep variables that imported modules have added."""
    added = {name: value for name, value in os.environb.items() if name not in initial}
    os.environb.clear()
    os.environb.update({**added, **{_encode(name): _encode(given[name]) for name in given}})


def _import_quietly() -> None:
    with contextlib.suppress(OSError):  # a kernel without niceness a thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    import_all()


def import_all() -> None:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception:  # the training imports it again, and says what is wrong
            return


def forget_input() -> None:
    """Redirect standard input to /dev/null, as it is for ranks that the agent starts."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115 # for as long as we live


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

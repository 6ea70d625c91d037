"""Fork the ranks of a node from one process that has imported torch once (`--fork`).

Only imports precede the fork: no thread of ours, no CUDA, no process group. If an import has
started a thread or opened a GPU, forked processes would be broken, and each rank starts in the
usual way. The agent (varuna_core/agent/setup/forked_ranks.py) sends each rank's environment on
standard input, and becomes the ranks' parent when this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
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
from varuna_core.programs.standby import forget_input, import_all, take_environment

FORK = "--fork"
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER, _ANY = 0x59616D61, -1
_LOOK_S = 0.001


def fork_ranks() -> None:
    """Fork the ranks and return in each of them; the calling process exits here."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    task = json.loads(line)
    report = os.dup(1)
    os.dup2(2, 1)  # for what modules print as they are imported
    initial = dict(os.environb)
    import_all()
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
            if is_broken:
                words = [word for word in sys.orig_argv[1:] if word != FORK]
                os.execv(sys.executable, [sys.executable, *words])
            return
        os.close(done)
        os.read(ready, 1)  # it has a session of its own: the agent ends what is left of ours
        os.close(ready)
        os.write(report, b"%d\n" % pid)
    os._exit(0)


def holds_gpu(open_files: Path) -> bool:
    """True where one of these is a GPU's: what torch has set up on it does not survive a fork."""
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

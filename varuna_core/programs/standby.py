"""Run a standby rank: import what a training needs, then wait for a task on standard input.

    main thread     reads standard input ──────────────────► environment, arguments ─► the training
    another thread  niceness 10: imports torch and the rest ─┘

On Linux niceness belongs to a thread, and cannot be lowered again without privileges; so the thread
that imports beside a running training is not the one that trains later.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Mapping

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


def wait_for_task() -> list[str] | None:
    """Set the environment and return the arguments of the rank to become; None if not needed."""
    initial = dict(os.environb)
    importing = threading.Thread(target=_import_quietly, name="imports", daemon=True)
    importing.start()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return None
    task = json.loads(line)
    importing.join()
    take_environment(task["env"], initial)
    arguments: list[str] = task["arguments"]
    sys.argv[1:] = arguments
    forget_input()
    return arguments


def take_environment(given: Mapping[str, str], initial: Mapping[bytes, bytes]) -> None:
    """Take the rank's environment; variables that a module set at its import stay."""
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
    """Make standard input empty from now on, as it is for every rank."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115 # for as long as we live


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

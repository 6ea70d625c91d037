"""A process that forks ranks, so that each need not import torch: `process_pool.py <socket> ranks`.

One process a test session imports what ranks import and then only forks. A rank begins where
`python -m <module> <arguments>` would, with environment, output and random numbers of its own, and
ends as any process does. Nothing has run in the process that forks: no thread, no tensor, no group,
so a rank inherits no state of another. `process_pool.py <socket> commands` does the same for
commands of vjob, of which most of the time is their imports, `reports` for those that need pandas,
and `scripts` for scripts of users, under an interpreter that has their frameworks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import varuna_core

PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch._meta_registrations",
    "torch._decomp.decompositions",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.flop_counter",
    "varuna_core.programs.gpt",
    "varuna_core.programs.bert",
    "varuna_core.programs.training",
)
"""Modules that ranks import, torch's late ones too; and all of these packages of ours."""
PACKAGES = ("varuna_core.runtime.", "varuna_core.profiling.", "varuna_core.checkpoint.")
SCRIPTS = ("torch", "torch._dynamo", "torch.distributed.fsdp")
"""Most of what a script of any framework imports; an optimizer imports dynamo."""
COMMANDS = (
    "vjob.shelf.commands.cli",
    "vjob.shelf.commands.monitor",
    "vjob.shelf.commands.report",
    "vjob.shelf.commands.runs",
    "vjob.shelf.commands.submit",
    "vjob.shelf.commands.trial",
    "vjob.jobs.monitor.log_lines",
    "vjob.jobs.monitor.readers.run",
    "vjob.shelf.screen.start",
    "vjob.jobs.planning.resolve_auto",
    "vjob.jobs.runs.cancel",
    "vjob.jobs.runs.foreign_job",
    "vjob.jobs.runs.listing",
    "vjob.jobs.schedulers.diagnosis",
    "vjob.jobs.schedulers.local.scheduler",
    "vjob.jobs.submit.here",
    "vjob.jobs.submit.like",
    "vjob.jobs.submit.preview",
    "vjob.jobs.submit.submit",
)
"""What the usual commands import late, and none of what only some need: numpy, pandas, textual."""
REPORTS = (
    *COMMANDS, "vjob.jobs.reporting.report", "vjob.reports.page.run_page", "vjob.shelf.compare"
)  # fmt: skip
"""With numpy and pandas, which take most of the time of a report."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A process to start."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    niceness: int


LONGEST = 1 << 20
"""Bytes of an order; more than Linux lets an environment have in practice."""


def wait_for_order(orders: socket.socket) -> Order | None:
    """Fork for each order: the process returns with its order, the pool with None at its end."""
    ends: dict[int, int] = {}
    woken, waking = os.pipe()
    for end in (woken, waking):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            report(ends)
        if orders in ready:
            message, descriptors, _, _ = socket.recv_fds(orders, LONGEST, 3)
            if not message:
                return None
            *written, end = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (woken, waking, end, *ends.values()):
                    os.close(number)
                orders.close()
                order = Order(**json.loads(message))
                become(order, written)
                return order
            for number in written:
                os.close(number)
            ends[pid] = end
            orders.send(str(pid).encode())


def report(ends: dict[int, int]) -> None:
    """Write the exit code of each ended process, negative for a signal, to its waiting parent."""
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = ends.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(end)


def preload_ranks() -> None:
    preload(PRELOADED)
    for module in pkgutil.walk_packages(varuna_core.__path__, "varuna_core."):
        if module.name.startswith(PACKAGES) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    importlib.import_module("tests.ranks.dry_runs").DryRuns().install()


def preload(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def become(order: Order, written: list[int]) -> None:
    """As a process that was started with it would be."""
    for number, descriptor in enumerate(written, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if os.getpriority(os.PRIO_PROCESS, 0) != order.niceness:
        os.setpriority(os.PRIO_PROCESS, 0, order.niceness)
    os.environ.clear()
    os.environ.update(order.environment)
    time.tzset()
    os.chdir(order.folder)
    sys.path[0] = order.folder
    sys.argv = [order.module, *order.arguments]
    random.seed()


_kept: list[dict[str, Any]] = []
"""Variables of the program that ran, which `leave` ends with the process: freed before, the process
group of a model waits for gloo's thread, which waits for the interpreter's lock."""


def leave(codes: list[int]) -> None:
    """End a program that has an exit code without taking its modules apart, which takes 0.25 s with
    torch. Registered first, this is called last."""
    for code in codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    codes: list[int] = []
    atexit.register(leave, codes)
    of = sys.argv[2]
    if of == "ranks":
        preload_ranks()
    else:
        preload({"commands": COMMANDS, "reports": REPORTS, "scripts": SCRIPTS}[of])
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run after the imports: no process may fork then")
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    order = wait_for_order(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        try:
            if order.module.endswith(".py"):
                _kept.append(runpy.run_path(order.module, run_name="__main__"))
            else:
                _kept.append(runpy.run_module(order.module, run_name="__main__", alter_sys=True))
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            codes.append(end.code or 0)
        else:
            codes.append(0)


if __name__ == "__main__":
    main()

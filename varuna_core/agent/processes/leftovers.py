"""Processes that outlive their rank: they ran off in a session of their own.

The agent adopts them (it is their subreaper) and ends them once all its ranks have ended, so that
no forgotten server holds a GPU, a port or memory of the next job on this node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from varuna_core.agent.processes.proc import list_below, list_stats
from varuna_core.agent.processes.process import set_process_option

_PR_SET_CHILD_SUBREAPER = 36
_SPARED = ("catatonit", "podman pause")
"""Whoever first runs podman on a node leaves this behind: it holds the user's name space open, and
his other containers are in there."""
_PATIENCE_S = 5.0
_POLL_S = 0.05


def adopt_orphans() -> None:
    """From now on, processes whose parents ended are children of this process."""
    set_process_option(_PR_SET_CHILD_SUBREAPER, 1)


def end_leftovers(patience_s: float, tidy_s: float = 0) -> list[str]:
    """End every process below this one: TERM, patience, KILL. Returns who they were.

    Nothing that this process still needs may run then. Those that end by themselves within
    `tidy_s` are not spoken of.
    """
    deadline = time.monotonic() + tidy_s
    while (found := _find_living()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if not found:
        return []
    _signal_all(found, signal.SIGTERM)
    deadline = time.monotonic() + min(patience_s, _PATIENCE_S)
    while _find_living() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _PATIENCE_S
    while (rest := _find_living()) and time.monotonic() < deadline:
        _signal_all(rest, signal.SIGKILL)
        time.sleep(_POLL_S)
    return [f"{pid} ({name})" for pid, name in sorted(found.items())]


def _find_living() -> dict[int, str]:
    """Everything below this process, by process id, with names. Reaps what has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    living = {pid: stat for pid, stat in list_stats().items() if stat.is_alive}
    names = {pid: living[pid].name for pid in list_below([os.getpid()], living)}
    return {pid: name for pid, name in names.items() if name not in _SPARED}


def _signal_all(found: dict[int, str], number: int) -> None:
    for pid in found:
        with contextlib.suppress(OSError):  # gone already, or another user's
            os.kill(pid, number)

"""Tell a script when to save and leave: its run will change nodes, be cancelled or reach its limit.

    from varuna_core import leaving

    leaving.listen()                    # call this early: until then, a signal is pending
    for step in ...:
        ...
        if leaving.is_time():           # the same answer on all ranks
            save()
            leaving.leave()             # exit 0 once all ranks have reached this call

vjob sends SIGUSR1 to the rank's process, on some nodes earlier than on others. If a rank left at
once, the others would hang in a step, so `is_time` asks all ranks: call it at the end of a step,
equally often on every rank. A run that may change its layout (morph) then continues on the
available nodes (docs/morphing.md). A script that uses Varuna calls `save_on_signal` instead.

This module uses the standard library only. If torch.distributed is initialized, the ranks
communicate over a separate gloo group, so that no rank waits for its GPU; other programs pass
`agree`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from varuna_core.runtime.saving.preemption import list_ours

CALLS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals handled here. SIGTERM is excluded, since it also arrives when ranks cannot respond."""

NO_TIMEOUT = timedelta(days=365)
"""Timeout of this module's group: a rank may save for longer than torch's 30 minutes."""

Agree = Callable[[bool], bool]
"""Function that takes this rank's answer and returns True on all ranks if any rank's is True."""

_heard = 0
_pid = 0
_group: Any = None
_code: int | None = None
"""Exit code of a rank that leaves."""


def listen() -> None:
    """Start to record signals; call this in the main thread. Further calls have no effect."""
    global _pid
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("leaving.listen() sets signal handlers: call it in the main thread")
    if _pid != os.getpid():
        atexit.register(_end)
    _pid = os.getpid()
    for number in list_ours(CALLS):
        signal.signal(number, _note)


def is_asked() -> bool:
    """Return True once this rank's process was asked to save and leave; other ranks may differ."""
    return bool(_heard)


def is_time(agree: Agree | None = None) -> bool:
    """Return True, on all ranks in the same step, once any rank was asked to save and leave.

    Call this at the end of a step, equally often on every rank. Programs that do not use
    torch.distributed pass `agree`.
    """
    if not _pid:
        listen()
    if agree is not None:
        return agree(is_asked())
    distributed = _find_distributed()
    if distributed is not None:
        return _ask_all(distributed)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "leaving.is_time() asks all ranks: call it after "
            "torch.distributed.init_process_group, or pass agree="
        )
    return is_asked()


def leave(code: int = 0) -> NoReturn:
    """End this rank after its state was saved, once all torch.distributed ranks have called this;
    ignore further signals meanwhile.

    Exit handlers registered after `listen` are run. Then the process ends without torch's teardown,
    since gloo's threads may abort the process if their peers are gone.
    """
    global _code
    for number in list_ours(CALLS):
        signal.signal(number, signal.SIG_IGN)
    distributed = _find_distributed()
    if distributed is not None:
        distributed.barrier(group=_find_group(distributed))
    _code = code
    raise SystemExit(code)


def _end() -> None:
    """End the process of a rank that leaves, as its last exit handler."""
    if _code is None or os.getpid() != _pid:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_code)


def _note(number: int, frame: Any) -> None:
    global _heard
    if os.getpid() == _pid:  # a data loader's worker that was forked from us has nothing to save
        _heard = _heard or number


def _find_distributed() -> Any:
    """Return torch.distributed if a process group is initialized, without importing torch."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _find_group(distributed: Any) -> Any:
    global _group
    if distributed.get_backend() == "gloo":
        return None
    if _group is None:
        _group = distributed.new_group(backend="gloo", timeout=NO_TIMEOUT)
    return _group


def _ask_all(distributed: Any) -> bool:
    torch = sys.modules["torch"]
    flag = torch.tensor([int(is_asked())], device="cpu")
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=_find_group(distributed))
    return bool(flag.item())

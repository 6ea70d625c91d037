"""Tells a script to save and leave: its run will change its nodes, be cancelled or reach its limit.

    from varuna_core import leaving

    leaving.listen()                    # early: before it, a signal waits
    for step in ...:
        ...
        if leaving.is_time():           # the same answer on all ranks
            save()
            leaving.leave()             # exit 0, when all ranks have come so far

vjob sends SIGUSR1 to the rank's process, to some nodes sooner than to others. A rank that left at
once would leave the others in the middle of a step, so `is_time` asks all ranks: call it where a
step is done, on every rank as often. A run that may morph goes on with the nodes that are there
then (docs/morphing.md); a script that Varuna trains has `save_on_signal` and needs nothing of
this.

Standard library only. Where torch.distributed runs, the ranks ask each other over a group of gloo's
own, so that no rank waits for its GPU; other programs give `agree`.
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

from varuna_core.runtime.saving.preemption import NCCL_DUMPS

CALLS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals handled here; not SIGTERM, which also comes when ranks cannot answer after a failure."""

NO_TIMEOUT = timedelta(days=365)
"""Timeout of the ranks' own group: a rank may save for longer than torch's half hour."""

Agree = Callable[[bool], bool]
"""Function from this rank's answer to True on all ranks if it was True on any."""

_heard = 0
_pid = 0
_group: Any = None
_code: int | None = None
"""Exit code of a rank that leaves."""


def listen() -> None:
    """Record signals from now on; call this in the main thread. A second call has no effect."""
    global _pid
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("leaving.listen() sets signal handlers: call it in the main thread")
    if _pid != os.getpid():
        atexit.register(_end)
    _pid = os.getpid()
    for number in _list_ours():
        signal.signal(number, _note)


def is_asked() -> bool:
    """Return True once this rank's process was asked to save and leave, perhaps before others."""
    return bool(_heard)


def is_time(agree: Agree | None = None) -> bool:
    """True, on all ranks in the same step, once any of them was asked to save and leave.

    Every rank calls it where a step is done, equally often. `agree` is for ranks that do not meet
    through torch.distributed.
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
            "torch.distributed.init_process_group, or give agree="
        )
    return is_asked()


def leave(code: int = 0) -> NoReturn:
    """End this rank after its state was saved, once all torch.distributed ranks are here; further
    signals are ignored meanwhile.

    Exit handlers registered since `listen` run. Then the process ends without tearing torch down,
    since gloo's threads may abort it if their peers are gone.
    """
    global _code
    for number in _list_ours():
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


def _list_ours() -> list[signal.Signals]:
    """Return the signals that the user has not given to NCCL."""
    taken = {os.environ.get(name) for name in NCCL_DUMPS}
    return [number for number in CALLS if str(int(number)) not in taken]


def _find_distributed() -> Any:
    """Return torch.distributed if its process group runs, without importing it."""
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

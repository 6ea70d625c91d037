"""Record signals that ask a training to save, and act on them on all ranks at the same point.

    signal ─► noted ─► all ranks agree (agreement.py) ─► next step starts: handler, or save, leave

A handler that saves at once would run at different moments on different ranks, within a step. So a
user's own handler is called at the start of the next step, on every rank, whichever got the signal.

A forked child (a data loader) inherits these handlers: SIGTERM ends it as usual, and it ignores the
others.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

log = logging.getLogger(__name__)

CALLS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Handled signals; if ranks received different signals, the last one in this tuple is used."""

NCCL_DUMPS = ("NCCL_PROXY_DUMP_SIGNAL", "NCCL_RMA_PROXY_DUMP_SIGNAL")
"""Variables by which a user makes NCCL dump its state on a signal, which is then left to NCCL."""

Handler = Callable[[int, Any], Any]


def ignore_calls() -> None:
    """Ignore the signals in a process that has saved and is about to exit: a signal may arrive
    seconds later than on other nodes, and must not end a rank that has already responded."""
    if threading.current_thread() is threading.main_thread():
        for number in list_ours(CALLS):
            signal.signal(number, signal.SIG_IGN)


def list_ours(
    calls: Iterable[signal.Signals], environ: Mapping[str, str] = os.environ
) -> list[signal.Signals]:
    """Return the given signals without those that the user has left to NCCL."""
    not_ours = {environ.get(name) for name in NCCL_DUMPS}
    return [number for number in calls if str(int(number)) not in not_ours]


class SignalCalls:
    """This process's signal handlers, installed once a save or a user handler needs them."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.heard = 0
        """The first signal that has not been handled yet, or 0."""

        self.own: dict[int, Handler] = {}
        """The user's handlers that Varuna's handlers have replaced."""

        self._kept: dict[int, Any] = {}
        self._pid = os.getpid()
        self._ours = list_ours(CALLS, environ)

    def listen(self) -> None:
        """Handle all signals of CALLS from now on."""
        for number in self._ours:
            self._put(number)

    def claim_handlers(self) -> None:
        """Reinstall Varuna's handlers if the user has since set others, or if a native library has
        replaced them, as NCCL did with SIGUSR1 before it had a variable for this."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in CALLS:
            now = signal.getsignal(number)
            if now == self._handle:
                signal.signal(number, self._handle)
            elif callable(now):
                self._put(number)
            elif number in self._kept:  # the user took it back
                del self._kept[number]
                self.own.pop(number, None)

    def _put(self, number: int) -> None:
        now = signal.getsignal(number)
        if now == self._handle:
            return
        other = getattr(now, "__self__", None)
        if isinstance(other, SignalCalls):  # of a Varuna that was not closed
            now = other._kept.get(number, signal.SIG_DFL)
        self._kept[number] = now
        self.own.pop(number, None)
        if callable(now):
            self.own[number] = now
        signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.heard = self.heard or number

    def answer(self, number: int) -> Handler | None:
        """Return the user's handler for the signal that was agreed on, and mark it handled."""
        if self.heard == number:
            self.heard = 0
        return self.own.get(number)

    def close(self) -> None:
        """Restore the previous handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._kept.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._kept.clear()
        self.own.clear()

"""Signals that ask a training to save: noted when they come, acted on by all ranks at one place.

    signal ─► noted ─► all ranks agree (agreement.py) ─► next step begins: handler, or save, leave

A handler that saves at once would do so on each rank at another instant, in the middle of a step.
So a user's own handler is called where the next step begins, with all of the last one done, on
every rank, whichever rank the signal reached.

A child that was forked from us (a data loader) has our handlers too: SIGTERM ends it as it would
have without, the others pass it by.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

CALLS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Where ranks heard different ones, the last of these counts."""

NCCL_DUMPS = ("NCCL_PROXY_DUMP_SIGNAL", "NCCL_RMA_PROXY_DUMP_SIGNAL")
"""Where a user has told NCCL to print its state on a signal, that signal is left to it."""

Handler = Callable[[int, Any], Any]


def ignore_calls(environ: Mapping[str, str] = os.environ) -> None:
    """For a process on its way out, with all saved: the signal may reach the node of one rank
    seconds after that of another, and what all have answered is not to end this one."""
    if threading.current_thread() is threading.main_thread():
        for number in _list_ours(environ):
            signal.signal(number, signal.SIG_IGN)


def _list_ours(environ: Mapping[str, str]) -> list[signal.Signals]:
    not_ours = {environ.get(name) for name in NCCL_DUMPS}
    return [number for number in CALLS if str(int(number)) not in not_ours]


class SignalCalls:
    """This process' handlers, put in place where somebody wants to hear."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.heard = 0
        """The signal that came first and is not answered yet."""

        self.own: dict[int, Handler] = {}
        """The user's handlers, in whose place ours are."""

        self._kept: dict[int, Any] = {}
        self._pid = os.getpid()
        self._ours = _list_ours(environ)

    def listen(self) -> None:
        """Hear all of CALLS from now on."""
        for number in self._ours:
            self._put(number)

    def claim_handlers(self) -> None:
        """Put ours in place of handlers that the user has set since, and back where a library
        below Python has put its own over ours, as NCCL did with SIGUSR1 until it had a variable
        for that."""
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
        """The user's handler of a signal that all ranks agreed on; it counts as answered."""
        if self.heard == number:
            self.heard = 0
        return self.own.get(number)

    def close(self) -> None:
        """Put back what was there."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._kept.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._kept.clear()
        self.own.clear()

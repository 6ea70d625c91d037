"""Calls a function for each of many files: in turn, or several at once where the calls mostly wait.

A call on the file server of a cluster takes about a millisecond, so the files of a thousand nodes
take many seconds of waiting; on a local disk threads would only cost time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 16
"""Number of threads, and of calls made before the first result is used, which bounds memory."""
LEAST_WAIT_S = 100e-6
"""Threads are used only if a call waits longer than this on average."""

Item = TypeVar("Item")
Found = TypeVar("Found")


class ManyFiles:
    """Calls a function for each of many files. The first calls are made in turn; if they mostly
    wait for the file system, all later ones are made in threads."""

    def __init__(self) -> None:
        self._is_slow = False

    def call(self, function: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[Found]:
        """Call the function with each item; yield what it returns, in the order of the items.

        The function must be safe to run in several threads at once: it may change its own item and
        nothing else.
        """
        for at in range(0, len(items), AT_ONCE):
            some = items[at : at + AT_ONCE]
            found: Iterable[Found]
            found = (
                _threads().map(function, some)
                if self._is_slow
                else self._call_in_turn(function, some)
            )
            yield from found

    def _call_in_turn(
        self, function: Callable[[Item], Found], items: Sequence[Item]
    ) -> list[Found]:
        """Call the function with one item after another, and measure whether the calls mostly
        wait."""
        began, worked_s = time.perf_counter(), time.thread_time()
        found = [function(item) for item in items]
        worked_s = time.thread_time() - worked_s
        waited_s = time.perf_counter() - began - worked_s
        if len(items) == AT_ONCE and waited_s > max(worked_s, AT_ONCE * LEAST_WAIT_S):
            self._is_slow = True
        return found


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the pool of threads that all objects of `ManyFiles` in this process share."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="read")

"""Reads many files one after another, or several at once where reading mostly waits.

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
"""Items that are read before the first of them is used, which bounds memory."""
LEAST_WAIT_S = 100e-6
"""Least time that an item waits on average if threads are to be worth it."""

Item = TypeVar("Item")
Found = TypeVar("Found")


class ManyFiles:
    """Calls a function for each of many files, in threads once it mostly waits."""

    def __init__(self) -> None:
        self._is_slow = False

    def call(self, function: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[Found]:
        """Yield what the function returns for each item, in their order.

        The function may run in a thread beside those of other items: it makes system calls for its
        own item and changes nothing else.
        """
        for at in range(0, len(items), AT_ONCE):
            some = items[at : at + AT_ONCE]
            found: Iterable[Found]
            found = _threads().map(function, some) if self._is_slow else self._try(function, some)
            yield from found

    def _try(self, function: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
        """Call the function without threads, and note whether it mostly waited."""
        began, worked_s = time.perf_counter(), time.thread_time()
        found = [function(item) for item in items]
        worked_s = time.thread_time() - worked_s
        waited_s = time.perf_counter() - began - worked_s
        if len(items) == AT_ONCE and waited_s > max(worked_s, AT_ONCE * LEAST_WAIT_S):
            self._is_slow = True
        return found


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that all readers of this process share."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="read")

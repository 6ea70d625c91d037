"""Failure of a rank, which stops all: the first error goes by the store, the rest by closed groups.

A rank that fails writes what happened into the store, if it is the first, and closes its groups;
its neighbours' waits end with an error, they read the store, say what was written there and close
theirs. A rank that is killed writes nothing: the first that misses it does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class RankFailed(RuntimeError):
    """Another rank's failure ended this rank's step; the message holds the first error."""


class ChannelClosed(RuntimeError):
    """A neighbour has gone, or said that it failed."""


class FailureBoard:
    """The place in the store where the first error is written."""

    def __init__(self, store: Any, key: str) -> None:
        self.store, self.key = store, key

    def write(self, text: str) -> str:
        """Write the error unless there is one; returns the first one."""
        try:
            if self.store is None:
                return text
            first: str = self.store.compare_set(self.key, "", text).decode()
            return first
        except RuntimeError as error:
            log.debug("failure not written: %s", error)
            return text

    def read(self) -> str:
        """The first error, or nothing."""
        if self.store is None or not self.store.check([self.key]):
            return ""
        return bytes(self.store.get(self.key)).decode()


def describe_error(error: BaseException) -> str:
    """Type and message, the first line, without gloo's source file and advice."""
    line = (str(error).strip().splitlines() or [""])[0]
    source, _, rest = line.partition("] ")
    if line.startswith("[") and "/gloo/" in source:
        line = rest
    line = line.partition(". This is typically")[0]
    return f"{type(error).__name__}: {line}".rstrip(": ")


def is_connection_error(error: BaseException) -> bool:
    """It is another rank's doing; gloo's own errors are plain RuntimeErrors (torch 2.13)."""
    if isinstance(error, (ChannelClosed, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


ABORT_S = 30.0
"""For NCCL to let go of its work; in some versions it hangs there."""


def find_nccl(group: Any) -> Any:
    """NCCL's part of a group; None where it has none."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if backend.name() == "nccl" else None


def abort_work(backends: Sequence[Any]) -> None:
    """End what these parts of NCCL have under way, whoever is gone: to destroy them would wait.

    All of them as one group, or each might wait for another one's; in a thread, so that a rank that
    failed ends even so.
    """
    if not backends:
        return

    def abort() -> None:
        try:
            backends[0]._group_start()
            try:
                for backend in backends:
                    backend.abort()
            finally:
                backends[0]._group_end()
        except RuntimeError as error:
            log.debug("not aborted: %s", error)

    thread = threading.Thread(target=abort, daemon=True, name="abort")
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        log.warning("NCCL has not let go of its work for %g s", ABORT_S)


def close_group(group: Any) -> None:
    """Let go of the group; a rank that waits for this one in it gets an error at once."""
    try:
        if find_nccl(group) is None:
            dist.destroy_process_group(group)
        else:  # shutdown, which destroying begins with, waits for what is under way
            dist.distributed_c10d._abort_process_group(group)
    except (RuntimeError, ValueError, AssertionError) as error:  # gone already
        log.debug("group not closed: %s", error)

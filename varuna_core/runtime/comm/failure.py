"""Stop all ranks when one fails: the error is passed through the store, and groups are closed to
stop the ranks.

The first rank that fails writes its error to the store and closes its groups. The neighbours' waits
then end with an error; the neighbours read and report the error in the store, and close their own
groups. A killed rank writes nothing; the first rank that notices the loss writes an error instead.
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
    """Raised if another rank's failure ended this rank's step; the message is the first error."""


class ChannelClosed(RuntimeError):
    """Raised if a neighbour is gone or reported that it failed."""


class FailureBoard:
    """The store's key that holds the first error of any rank."""

    def __init__(self, store: Any, key: str) -> None:
        self.store, self.key = store, key

    def write(self, text: str) -> str:
        """Write an error unless the store already has one; return the first error."""
        try:
            if self.store is None:
                return text
            first: str = self.store.compare_set(self.key, "", text).decode()
            return first
        except RuntimeError as error:
            log.debug("failure not written: %s", error)
            return text

    def read(self) -> str:
        """Return the first error, or an empty string."""
        if self.store is None or not self.store.check([self.key]):
            return ""
        return bytes(self.store.get(self.key)).decode()


def describe_error(error: BaseException) -> str:
    """Return the type and first line of an error, without gloo's source location and hints."""
    line = (str(error).strip().splitlines() or [""])[0]
    source, _, rest = line.partition("] ")
    if line.startswith("[") and "/gloo/" in source:
        line = rest
    line = line.partition(". This is typically")[0]
    return f"{type(error).__name__}: {line}".rstrip(": ")


def is_connection_error(error: BaseException) -> bool:
    """Return True if an error comes from a lost peer: gloo raises RuntimeErrors (torch 2.13)."""
    if isinstance(error, (ChannelClosed, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


ABORT_S = 30.0
"""Seconds to wait for NCCL to abort its work, since some versions hang there."""


def find_nccl(group: Any) -> Any:
    """Return a group's NCCL backend; None if the group has none."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if backend.name() == "nccl" else None


def abort_work(backends: Sequence[Any]) -> None:
    """Abort the pending work of these NCCL backends; destroying them would wait for lost ranks.

    The backends are aborted together, since one might wait for another, and in a thread, so that a
    failed rank ends even if NCCL hangs.
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
        log.warning("NCCL did not finish aborting its work within %g s", ABORT_S)


def close_group(group: Any) -> None:
    """Close a group; other ranks that wait in the group for this one get an error at once."""
    try:
        if find_nccl(group) is None:
            dist.destroy_process_group(group)
        else:  # shutdown, which destroying begins with, waits for what is under way
            dist.distributed_c10d._abort_process_group(group)
    except (RuntimeError, ValueError, AssertionError) as error:  # gone already
        log.debug("group not closed: %s", error)

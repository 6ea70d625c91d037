"""Errors of checkpoints and of folders of checkpoints; each message names the file."""

from __future__ import annotations

from varuna_core.records.files import NO_ROOM, STORE_FAILED, find_errno


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written or read."""


class DamagedCheckpoint(CheckpointError):
    """Raised if a file is missing, truncated or changed."""


class ForeignCheckpoint(CheckpointError):
    """Raised for a folder or file that is not a Varuna checkpoint, or is of a later version."""


class NoCheckpoint(CheckpointError):
    """Raised if there is no complete checkpoint to load."""


class NotSaved(CheckpointError):
    """Raised if a save failed for a reason that may pass; later saves may succeed."""


class NoRoom(NotSaved):
    """Raised if the folder's disk or the quota is full."""


class StoreFailed(NotSaved):
    """Raised if the disk or the file server failed."""


class FolderTaken(CheckpointError):
    """Raised if another job saves into the same folder."""


def build_error(error: Exception, text: str) -> CheckpointError:
    """Build the error of a save; its class depends on the cause."""
    if isinstance(error, NotSaved):
        return type(error)(text)
    code = find_errno(error)
    kind = NoRoom if code in NO_ROOM else StoreFailed if code in STORE_FAILED else CheckpointError
    return kind(text)

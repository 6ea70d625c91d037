"""Errors of checkpoints and of folders of them; each message names the file."""

from __future__ import annotations

from varuna_core.records.files import NO_ROOM, STORE_FAILED, find_errno


class CheckpointError(RuntimeError):
    """A checkpoint was not written or not read."""


class DamagedCheckpoint(CheckpointError):
    """A file is missing, cut short or changed."""


class ForeignCheckpoint(CheckpointError):
    """A folder or file that is none of ours, or of a later version than this one reads."""


class NoCheckpoint(CheckpointError):
    """There is no complete checkpoint to load."""


class NotSaved(CheckpointError):
    """A save that the folder could not take; a later one may succeed, and nothing else is wrong."""


class NoRoom(NotSaved):
    """The folder's disk or the quota is full."""


class StoreFailed(NotSaved):
    """The disk or the file server failed."""


class FolderTaken(CheckpointError):
    """Another job saves into the same folder."""


def build_error(error: Exception, text: str) -> CheckpointError:
    """Error of a save with this text, of the kind that its cause makes it."""
    if isinstance(error, NotSaved):
        return type(error)(text)
    code = find_errno(error)
    kind = NoRoom if code in NO_ROOM else StoreFailed if code in STORE_FAILED else CheckpointError
    return kind(text)

"""Errors of checkpoints and of folders of them; each message names the file."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint was not written or not read."""


class DamagedCheckpoint(CheckpointError):
    """A file is missing, cut short or changed."""


class ForeignCheckpoint(CheckpointError):
    """A folder or file that is none of ours, or of a later version than this one reads."""


class NoCheckpoint(CheckpointError):
    """There is no complete checkpoint to load."""


class FolderTaken(CheckpointError):
    """Another job saves into the same folder."""

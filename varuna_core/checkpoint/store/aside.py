"""Choose the checkpoint to continue from: the newest intact one; damaged ones are set aside.

    varuna_ckpt_200                      one rename: nothing is deleted, and the short name is free
    ─► varuna_ckpt_200.<save>.damaged/   for the same iteration, trained again
         damage.json                     the reason, for people

If a damaged checkpoint cannot be renamed (in a read-only folder), only this job ignores it.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from pathlib import Path

from varuna_core.checkpoint.format.document import READABLE
from varuna_core.checkpoint.format.errors import DamagedCheckpoint
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.store import find_complete, read_save
from varuna_core.records.checkpoints import DAMAGE, NAME, list_complete, list_damaged, name_of
from varuna_core.records.files import write_json

log = logging.getLogger(__name__)


class Choice:
    """Chooses the checkpoint to load: the requested iteration, or the newest intact one."""

    def __init__(self, store: Path, iteration: int | None, check_complete: bool) -> None:
        self.store, self.iteration, self.check_complete = store, iteration, check_complete
        self._refused: dict[Path, str] = {}
        """The reason for each damaged checkpoint, keyed by folder."""

    def refuse(self, folder: Path, error: DamagedCheckpoint) -> None:
        """Note that a checkpoint is damaged, on every rank; raise the error if it was requested by
        number."""
        if self.iteration is not None:
            raise error
        self._refused[folder] = str(error)

    def take(self) -> CheckpointReader:
        """Open the requested or the newest remaining checkpoint whose manifest and file sizes are
        valid, and set damaged ones aside; called by one rank."""
        while True:
            self._set_aside()
            folder = self._find()
            try:
                return CheckpointReader(folder, self.check_complete)
            except DamagedCheckpoint as error:
                self.refuse(folder, error)

    def _find(self) -> Path:
        """Return the folder to try next; raise an error if no checkpoint is intact, since a start
        from scratch would hide the loss."""
        if self.iteration is not None:
            return find_complete(self.store, self.iteration).path
        for found in reversed(list_complete(self.store)):
            if found.path not in self._refused:
                return found.path
        aside = {Path(one.path): one.reason for one in list_damaged(self.store)}
        damaged = {**aside, **self._refused}
        if not damaged:
            return find_complete(self.store).path
        last, reason = max(damaged.items(), key=lambda one: _iteration_of(one[0]))
        raise DamagedCheckpoint(
            f"{self.store} holds no intact checkpoint: {len(damaged)} damaged, {last.name}: "
            f"{reason}; to train from the beginning, choose another folder"
        )

    def _set_aside(self) -> None:
        for folder, reason in list(self._refused.items()):
            if not folder.exists():  # it got its short name meanwhile, or another job has it
                del self._refused[folder]
                continue
            try:
                aside = set_aside(folder, reason)
            except OSError as error:
                log.warning("%s is damaged but cannot be renamed: %s", folder, error)
                continue
            del self._refused[folder]
            log.warning("a damaged checkpoint is renamed to %s: %s", aside, reason)


def set_aside(folder: Path, reason: str) -> Path:
    """Rename a damaged checkpoint so that no job uses or removes it; return the new path."""
    save = read_save(folder)
    told = {
        "reason": reason,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    try:
        write_json(folder / DAMAGE, told, READABLE)
    except OSError as error:  # a full disk: the name says enough
        log.warning("the reason for the damage cannot be saved in %s: %s", folder, error)
    word, number = (save.save if save else "x"), 0
    while True:
        aside = folder.with_name(f"{name_of(_iteration_of(folder))}.{word}.damaged")
        try:
            os.rename(folder, aside)
            return aside
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        number += 1
        word = f"{save.save if save else 'x'}.{number}"


def _iteration_of(folder: Path) -> int:
    match = NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])

"""Skip saves that fail because of the disk: training continues, and the next save tries again.

A full disk is not the training's fault, so a save without space is always skipped. A failing disk
or file server may recover before the next save, or may fail on this node only: after MOST_FAILED
consecutive failures the error is raised, so that another node can take over. A training's last save
waits for space instead (`saving.save_whole`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from varuna_core.checkpoint.format.errors import NoRoom, NotSaved, StoreFailed
from varuna_core.records.checkpoints import Skipped, note_skipped
from varuna_core.records.files import describe_room
from varuna_core.records.runfolder import RunFolder

log = logging.getLogger(__name__)

MOST_FAILED = 5
"""Maximum number of consecutive saves that may fail because of the disk or file server."""


class SkippedSaves:
    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        run, attempt = environ.get("VJOB_RUN"), environ.get("VJOB_ATTEMPT", "0")
        self._path = RunFolder(Path(run)).attempt(int(attempt)).skipped if run else None
        self._failed: list[StoreFailed] = []

    def skip(self, error: NotSaved, store: Path, iteration: int, *, tells: bool = True) -> None:
        """Log and record that this save was skipped; `tells` is False on ranks that do not log."""
        if isinstance(error, StoreFailed):
            self._failed.append(error)
        if type(error) is NotSaved or not tells:  # the rank that could not save says why
            log.info("%s", error)
            return
        room = describe_room(store)
        where = f"{store} ({room})" if room else str(store)
        log.warning("skipped a save: %s; %s; training continues, and the next save will try again",
            where, error)  # fmt: skip
        self.note(error, store, iteration)

    def note(self, error: NotSaved, store: Path, iteration: int, *, waits: bool = False) -> None:
        """Record the error for `vjob status`; if `waits`, the save is retried and not skipped."""
        if self._path is not None:
            now = round(time.time(), 3)
            no_room = isinstance(error, NoRoom)
            one = Skipped(iteration, 1, now, str(store), str(error), no_room, waits)
            note_skipped(self._path, store, one)

    def note_saved(self) -> None:
        """Record that this rank's part of a save is written."""
        self._failed.clear()

    def expect_few(self) -> None:
        """Raise the last error if the disk or the file server has failed too often."""
        if len(self._failed) >= MOST_FAILED:
            raise self._failed[-1]

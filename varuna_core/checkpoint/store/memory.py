"""A rank's copies of its state in the memory of its node; records/memory.py has their files.

    copies.settle()                  # before a step: the copy before is laid to its end
    ...the step, which no rank ends before all ranks have begun it...
    copies.lay(part, share, count)   # after it: begins the next one, beside training

So when a copy is begun, the one before it is whole on all ranks, and those before that one may go:
two take turns, and one is whole whenever a rank dies.
"""

from __future__ import annotations

import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

from varuna_core.checkpoint.format.entries import CheckpointPart
from varuna_core.checkpoint.format.errors import NotSaved
from varuna_core.checkpoint.format.manifest import Save
from varuna_core.checkpoint.store.store import SaveFolder
from varuna_core.checkpoint.store.writer import Staging, encode_part, write_rank
from varuna_core.records.memory_copies import (
    SHARES,
    Share,
    find_room,
    list_copies,
    name_save,
    name_share,
)

log = logging.getLogger(__name__)

PARTS_AT_ONCE = 3
"""Two copies, and what the second of them is written from."""


class MemoryCopies:
    """One rank's, for one attempt."""

    def __init__(
        self, home: Path, *, attempt: int, rank: int, world_size: int, neighbours: int
    ) -> None:
        """`home` is the node's folder, `neighbours` the ranks on it."""
        self.home, self.attempt = home, attempt
        self._rank, self._world_size, self._neighbours = rank, world_size, neighbours
        self._staging = Staging()
        self._count = 0
        self._newest = ""
        """The last one that was begun here, or that the training began with."""
        self._copies_at_once = False
        """A weight was changed too early once."""
        self._thread: threading.Thread | None = None
        self.is_off = False

    def begin_from(self, copy: str) -> None:
        """The training goes on from this copy (or, if empty, from none): others are of no use."""
        self._newest = copy
        self._keep(copy)

    def fits(self, part: CheckpointPart) -> bool:
        """True if there is room for the copies of a node whose ranks are like this one."""
        size = sum(entry.num_bytes for held in part.segments.values() for entry in held)
        needed = PARTS_AT_ONCE * size * self._neighbours
        try:
            room = find_room(self.home)
        except OSError as error:
            log.warning("no copies in memory: %s", error)
            return False
        if needed > room:
            log.warning(
                "no copies in memory: %d ranks need %.1f GiB, %s has room for %.1f",
                self._neighbours, needed / 2**30, self.home.parent, room / 2**30,
            )  # fmt: skip
        return needed <= room

    def refuse(self) -> None:
        """No copies in this attempt; all ranks have agreed on it."""
        self.is_off = True
        self._keep()

    def clear(self) -> None:
        """Remove what this rank wrote before it could write no more."""
        self.settle()
        for name in list_copies(self.home):
            self._drop(self.home / name)

    def settle(self) -> None:
        """Until the last copy is laid."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_first(self) -> bool:
        return self._count == 0

    def wait_copied(self) -> None:
        """Until what the last copy is made of may be changed."""
        self._staging.wait(self._thread)

    def lay(
        self, part: CheckpointPart, index: int, count: int, line: str, *, later: bool = False
    ) -> None:
        """Begin a copy of this part, one of `count` shares; `later` as in `CheckpointWriter`."""
        self.settle()
        self._count += 1
        word = name_save(self.attempt, self._count)
        save = Save(iteration=part.iteration, save=word, job=word, line=line)
        folder = SaveFolder(self.home, save)
        older, self._newest = self._newest, folder.path.name
        part = encode_part(part)
        later = later and not self._copies_at_once
        self._staging.take(part.segments, later=later)
        share = Share(index, count, self._rank)
        self._thread = threading.Thread(
            target=self._write, args=(folder, part, share, older), name="memory copy"
        )
        self._thread.start()

    def _write(self, folder: SaveFolder, part: CheckpointPart, share: Share, older: str) -> None:
        try:
            part = replace(part, segments=self._staging.finish())
            self._keep(older, folder.path.name)
            write_rank(folder, part, self._rank, self._world_size)
            done = folder.path / SHARES / name_share(share)
            done.parent.mkdir(exist_ok=True)
            done.touch()
        except NotSaved as error:
            log.warning("iteration %d has no copy in memory: %s", part.iteration, error)
            self._copies_at_once = True
        except Exception as error:
            log.warning("no more copies in memory: iteration %d: %s", part.iteration, error)
            self.is_off = True
            self._staging = Staging()
            self._drop(folder.path)

    def _drop(self, folder: Path) -> None:
        """What this rank has in it: its room is wanted."""
        for path in folder.rglob(f"*rank-{self._rank:04d}*"):
            path.unlink(missing_ok=True)

    def _keep(self, *names: str) -> None:
        """Remove the others, which another rank of this node may do at the same time."""
        for name in list_copies(self.home):
            if name not in names:
                shutil.rmtree(self.home / name, ignore_errors=True)

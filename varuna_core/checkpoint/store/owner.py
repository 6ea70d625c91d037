"""A job's claim on a folder of checkpoints, and what it may remove there."""

from __future__ import annotations

import logging
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from varuna_core.checkpoint.format.document import read_document, write_document
from varuna_core.checkpoint.format.errors import FolderTaken
from varuna_core.checkpoint.format.manifest import Save
from varuna_core.checkpoint.store.store import read_save, remove
from varuna_core.records.checkpoints import MANIFEST, NAME, list_complete, name_of
from varuna_core.records.files import list_names

log = logging.getLogger(__name__)

IDLE_S = 3600.0
"""A partial checkpoint of another training in which nothing changed for so long is nobody's."""
_JOB = re.compile(r"[A-Za-z0-9_.-]{1,120}")


class Owner:
    """A job's claim on a store: who came last writes; the one before is told at its next save.

    It also remembers what was there when the job came, which alone it may replace and clear away,
    and only if it continues that training.
    """

    def __init__(self, store: Path, job: str, line: str) -> None:
        if not _JOB.fullmatch(job):
            raise ValueError(f"job {job!r}: at most 120 of letters, digits, - _ and .")
        self.store, self.job, self.line = store, job, line
        self.path = store / "owner.json"

    def claim(self) -> None:
        """By rank 0, before its first save."""
        self.store.mkdir(parents=True, exist_ok=True)
        found = [read_save(complete.path) for complete in list_complete(self.store)]
        others = sorted({save.job for save in found if save and save.line != self.line})
        if others:
            log.warning("%s also holds checkpoints of another training: %s", self.store, others)
        content = {
            "job": self.job,
            "line": self.line,
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "found": [save.save for save in found if save and save.line == self.line],
        }
        write_document(self.path, "owner", content)

    def check(self) -> None:
        """By rank 0, before each later save."""
        owner = self._read()
        if owner["job"] != self.job:
            raise FolderTaken(
                f"job {owner['job']} on {owner['host']} saves into {self.store} since "
                f"{owner['since']}; this is job {self.job}, which stops saving there: "
                "end one of them, or give each a folder of its own"
            )

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = read_document(self.path, "owner")
        return found

    def may_replace(self, there: Save | None) -> bool:
        """Of this job, or of the training it continues and there before it came."""
        if there is None or there.line != self.line:
            return False
        if there.job == self.job:
            return True
        owner = self._read()
        return owner["job"] == self.job and there.save in owner["found"]

    def keep(self, count: int, done: Save) -> None:
        """Remove all but `done` and what this job made before it, as many as are to stay.

        Those of earlier jobs go first, whatever their iteration: they may be of a future that was
        left when training went back.
        """
        mine = []
        for complete in list_complete(self.store):
            save = read_save(complete.path)
            if save is None or save.save == done.save or complete.path != self._path_of(save):
                continue
            if self.may_replace(save):
                order = _number(save) if save.job == self.job else -1
                mine.append((order, save.iteration, complete.path, save))
        mine.sort(key=lambda one: one[:2])
        for _, _, path, save in mine[: max(0, len(mine) - count + 1)]:
            remove(path, save)

    def _path_of(self, save: Save) -> Path:
        return self.store / name_of(save.iteration)

    def clean(self, done: Save) -> None:
        """Remove what nobody writes any more, now that `done` is complete."""
        now = (self._path_of(done) / MANIFEST).stat().st_mtime
        for name in sorted(list_names(self.store)):
            path = self.store / name
            if name.startswith(f".{self.path.name}.") and now - _last_change(path) > IDLE_S:
                path.unlink(missing_ok=True)  # of a claim that was cut off
            match = NAME.fullmatch(name)
            if not match or match[3] not in ("partial", "removed"):
                continue
            if match[3] == "removed":
                shutil.rmtree(path, ignore_errors=True)
            elif self._is_abandoned(path, match[2], done, now):
                log.info("removing %s, which was never finished", path)
                remove(path, read_save(path))

    def _is_abandoned(self, path: Path, word: str, done: Save, now: float) -> bool:
        job, _, number = word.rpartition(".")
        if job == self.job:
            # Ranks save in order: who has finished `done` has no part in an earlier one.
            return int(number) < _number(done)
        save = read_save(path)
        if save and save.line == self.line:
            return bool(self._read()["job"] == self.job)
        return now - _last_change(path) > IDLE_S


def _number(save: Save) -> int:
    return int(save.save.rpartition(".")[2])


def _last_change(folder: Path) -> float:
    latest = 0.0
    for path in (folder, folder / "markers", *folder.glob("*")):
        try:
            latest = max(latest, path.stat().st_mtime)
        except OSError:
            continue
    return latest

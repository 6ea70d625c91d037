"""The checkpoint of a try: saved by its first start, loaded by a second one.

built-in    saves after its second step; the second start must begin with the third
others      are asked to save when they are ended, as `vjob cancel` asks; where a checkpoint that
            vjob knows came of it, a second start shows whether it is loaded; else it is known
            that the folder can be written, and no more
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from varuna_core.records.checkpoints import Newest, find_newest
from vjob.jobs.conf.schema import BUILT_IN, JobConf
from vjob.shelf.trial.judgement import find_trouble
from vjob.shelf.trial.outlook import estimate_checkpoint, format_bytes
from vjob.shelf.trial.place import CheckpointFolder
from vjob.shelf.trial.result import MEASURED, Finding, Row, unknown
from vjob.shelf.trial.smaller import Trial, add_step
from vjob.shelf.trial.watching import Seen

NAME = "checkpoint"
Start = Callable[[JobConf, int], Seen | None]
"""Starts a conf and watches it for so many steps."""


class SavingTrial:
    """Tries the checkpoints of a healthy start."""

    def __init__(
        self, conf: JobConf, trial: Trial, folder: CheckpointFolder | None, limit_s: float
    ) -> None:
        """`conf` is the whole run's."""
        self.conf, self.trial, self.folder, self.limit_s = conf, trial, folder, limit_s
        self.is_built_in = conf.program.kind in BUILT_IN
        self.findings: list[Finding] = []

    def run(self, start: Start) -> Row:
        """The row that says what is known of checkpoints."""
        folder = self.folder
        if folder is None:
            whose = "so none is saved" if self.is_built_in else "and the program's own is not known"
            return unknown(NAME, f"train.checkpoint.folder is not set, {whose}")
        newest = None if folder.here is None else find_newest(folder.here)
        if newest is None and not self.is_built_in:
            if folder.here is None:
                return unknown(NAME, f"this machine does not see {folder.asked}")
            return self._make_row("the folder can be written; none was saved yet", {})
        if newest is None and folder.here is not None:
            cause = f"it ended well and no checkpoint is in {folder.asked}"
            self.findings.append(Finding(what=NAME, cause=cause))
            return unknown(NAME, "none was saved")
        size = None if folder.here is None else measure(folder.here)
        begun = self._start_again(start, newest)
        if begun is None:
            return unknown(NAME, "saved, and not loaded")
        sure = MEASURED
        if self.is_built_in and (self.trial.is_small or size is None):
            size, sure = estimate_checkpoint(self.conf), f"{MEASURED}; its size by the model's"
        self._check_room(size)
        values = {"saved": True, "loaded": not begun, "bytes": size}
        what = f"saved, not loaded: {begun}" if begun else "saved and loaded"
        return self._make_row(", ".join(filter(None, (what, format_bytes(size)))), values, sure)

    def _start_again(self, start: Start, newest: Newest | None) -> str | None:
        """Empty where the checkpoint was loaded, else what was seen; None with a finding."""
        first = self.trial.conf
        seen = start(add_step(first) if self.is_built_in else first, 1)
        troubles = [] if seen is None else find_trouble(seen, self.limit_s)
        said = ""
        if seen is not None and not troubles:
            saved = newest.step if newest is not None else first.train.steps
            if not seen.steps:
                said = "the second start printed no step"
            elif seen.steps[0] < saved + self.is_built_in:
                said = f"the second start began with step {seen.steps[0]}, after {saved}"
            if said and self.is_built_in:
                troubles = [Finding(what=NAME, cause=said)]
        self.findings += [replace(trouble, what=NAME) for trouble in troubles]
        return None if seen is None or troubles else said

    def _check_room(self, size: int | None) -> None:
        """A finding where the checkpoints that are kept do not fit."""
        assert self.folder is not None
        free, num = find_free_bytes(self.folder), count_checkpoints(self.conf)
        if size is None or free is None or num * size <= free:
            return
        self.findings.append(
            Finding(
                what=NAME,
                cause=f"{num} checkpoint{'s' if num > 1 else ''} of {format_bytes(size)} need "
                f"{format_bytes(num * size)}, and {self.folder.asked} has "
                f"{format_bytes(free)} free",
                remedy="make room, lower train.checkpoint.keep, or name another folder",
            )
        )

    def _make_row(self, text: str, values: dict[str, Any], sure: str = MEASURED) -> Row:
        assert self.folder is not None
        free = find_free_bytes(self.folder)
        room = f", {format_bytes(free)} free" if free is not None else ""
        known = {"folder": self.folder.asked, "free_bytes": free, "saved": False, "loaded": False}
        return Row(name=NAME, text=f"{text}{room}", certainty=sure, values={**known, **values})


def count_checkpoints(conf: JobConf) -> int:
    """The most that lie in the folder at once: the next is written before the oldest goes."""
    train, own = conf.train, conf.train.checkpoint
    if conf.program.kind not in BUILT_IN:
        return own.keep + 1
    written = -(-train.steps // own.every) if own.every else 1  # the last one at the end
    return min(own.keep + 1, written)


def find_free_bytes(folder: CheckpointFolder) -> int | None:
    """Room where the checkpoints go; None where this machine cannot see it."""
    try:
        stat = os.statvfs(folder.here or folder.asked)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def measure(folder: Path) -> int:
    """Bytes of all files in it: of a try it holds one checkpoint."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

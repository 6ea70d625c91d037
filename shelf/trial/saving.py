"""Checkpoint of a try: saved by its first start, loaded by a second one.

built-in    saves after its second step; the second start must begin with the third
others      are asked to save when they are ended, as `vjob cancel` asks; where a checkpoint that
            vjob knows came of it, a second start shows whether it is loaded; else it is known
            that the folder can be written, and no more
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.facts.finding import Finding
from varuna_core.facts.remedy import Action, Remedy, Target
from varuna_core.records.checkpoints import find_newest
from vjob.jobs.conf.schema import BUILT_IN, JobConf
from vjob.jobs.submit.snapshot import find_here
from vjob.shelf.trial.judgement import find_trouble, make_trouble
from vjob.shelf.trial.result import MEASURED, Row, Trouble, unknown
from vjob.shelf.trial.rows import format_bytes
from vjob.shelf.trial.smaller import Trial, add_step
from vjob.shelf.trial.watch import Seen

NAME = "checkpoint"
MARK = ".vjob-try-"
Start = Callable[[JobConf, int], Seen | None]
"""Starts a conf and watches it for so many steps."""
WRITABLE = Remedy(
    Action.CHANGE, Target.CHECKPOINT, detail="to one on the shared file system that you may write"
)


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """The folder of the try inside the conf's own."""

    asked: str
    """The conf's."""
    seen: str
    """The try's, as ranks see it."""
    here: Path | None
    """The try's, as this machine sees it; None where it does not."""
    made: tuple[Path, ...] = ()
    """Folders that were not there before, the innermost first."""
    problem: Trouble | None = None

    def remove(self) -> None:
        """Remove it with all checkpoints, and the folders above it that the try made."""
        if self.here is not None:
            shutil.rmtree(self.here, ignore_errors=True)
        for path in self.made[1:]:
            with contextlib.suppress(OSError):  # not empty: somebody else has begun to use it
                path.rmdir()

    @property
    def free_bytes(self) -> int | None:
        """Room where the checkpoints go; None where this machine cannot see it."""
        with contextlib.suppress(OSError):
            stat = os.statvfs(self.here or self.asked)
            return stat.f_bavail * stat.f_frsize
        return None


def make_folder(conf: JobConf, base: Path) -> CheckpointFolder | None:
    """Make a folder for the checkpoints of a try; None where the conf has none."""
    asked = conf.train.checkpoint.folder
    if asked is None:
        return None
    name = f"{MARK}{uuid.uuid4().hex[:8]}"
    outer = find_here(asked, conf, base)
    here = None if outer is None else outer / name
    made: tuple[Path, ...] = ()
    problem = None
    if here is not None:
        made = tuple(path for path in (here, *here.parents) if not os.path.lexists(path))
        try:
            here.mkdir(parents=True)
            (here / "probe").write_bytes(b"x")
            (here / "probe").unlink()
        except OSError as error:
            values = {"folder": asked, "why": error.strerror}
            problem = make_trouble(NAME, Finding("folder", values=values, remedies=(WRITABLE,)))
    return CheckpointFolder(
        asked=asked, seen=f"{asked}/{name}", here=here, made=made, problem=problem
    )


def try_checkpoint(
    conf: JobConf, trial: Trial, folder: CheckpointFolder | None, start: Start
) -> tuple[Row, list[Trouble]]:
    """The row about checkpoints after a healthy start; `conf` is the whole run's."""
    is_built_in = conf.program.kind in BUILT_IN
    if folder is None:
        whose = "so none is saved" if is_built_in else "and the program's own is not known"
        return unknown(NAME, f"train.checkpoint.folder is not set, {whose}"), []
    free = folder.free_bytes
    room = f", {format_bytes(free)} free" if free is not None else ""
    values = {"folder": folder.asked, "free_bytes": free, "saved": False, "loaded": False}
    newest = None if folder.here is None else find_newest(folder.here)
    if newest is None and not is_built_in:
        if folder.here is None:
            return unknown(NAME, f"this machine does not see {folder.asked}"), []
        text = f"the folder can be written; none was saved yet{room}"
        return Row(name=NAME, text=text, certainty=MEASURED, values=values), []
    if newest is None and folder.here is not None:
        lost = Finding("not saved", values={"folder": folder.asked})
        return unknown(NAME, "none was saved"), [make_trouble(NAME, lost)]
    saved = newest.step if newest is not None else trial.conf.train.steps
    size = None if folder.here is None else measure(folder.here)
    seen = start(add_step(trial.conf) if is_built_in else trial.conf, 1)
    troubles = [] if seen is None else find_trouble(seen)
    why = ""
    if seen is not None and not seen.steps:
        why = "the second start printed no step"
    elif seen is not None and seen.steps[0] < saved + is_built_in:
        why = f"the second start began with step {seen.steps[0]}, after {saved}"
    if why and is_built_in and not troubles:
        troubles = [make_trouble(NAME, Finding("not loaded", values={"seen": why}))]
    if seen is None or troubles:
        return unknown(NAME, "saved, and not loaded"), [replace(x, what=NAME) for x in troubles]
    known_size = None if trial.is_small and is_built_in else size
    values |= {"saved": True, "loaded": not why, "bytes": known_size}
    text = f"saved, not loaded: {why}" if why else "saved and loaded"
    text += f", {format_bytes(known_size)}" if known_size is not None else ""
    row = Row(name=NAME, text=text + room, certainty=MEASURED, values=values)
    return row, []


def measure(folder: Path) -> int:
    """Bytes of all files in it: of a try it holds one checkpoint."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

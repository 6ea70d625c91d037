"""The checkpoint folder of a try, inside the conf's own folder: created, measured and removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from vjob.jobs.conf.schema import JobConf
from vjob.jobs.submit.snapshot import find_here
from vjob.shelf.trial.result import Trouble

NAME = "checkpoint"
MARK = ".vjob-try-"


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """Folder for the checkpoints of a try, inside the conf's checkpoint folder."""

    asked: str
    """The conf's checkpoint folder."""
    seen: str
    """Path of the try's folder as ranks see it."""
    here: Path | None
    """Path of the try's folder on this machine; None if this machine does not see the folder."""
    made: tuple[Path, ...] = ()
    """Folders that the try created, the innermost first."""
    problem: Trouble | None = None

    def remove(self) -> None:
        """Remove the folder of the try's checkpoints, and those of its parent folders that the try
        created and that are empty."""
        if self.here is not None:
            shutil.rmtree(self.here, ignore_errors=True)
        for path in self.made[1:]:
            with contextlib.suppress(OSError):  # not empty: somebody else has begun to use it
                path.rmdir()

    @property
    def free_bytes(self) -> int | None:
        """Free bytes on the checkpoints' file system; None if this machine does not see it."""
        with contextlib.suppress(OSError):
            stat = os.statvfs(self.here or self.asked)
            return stat.f_bavail * stat.f_frsize
        return None

    def measure(self) -> int:
        """Return the bytes of all files in the folder: a try saves one checkpoint."""
        files = self.here.rglob("*") if self.here is not None else ()
        return sum(file.stat().st_size for file in files if file.is_file())


def make_folder(conf: JobConf, base: Path) -> CheckpointFolder | None:
    """Create a folder for the checkpoints of a try; return None if the conf sets no checkpoint
    folder."""
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
            problem = Trouble(
                what=NAME,
                rule="folder",
                cause=f"train.checkpoint.folder {asked} cannot be written: {error.strerror}",
                remedy="set train.checkpoint.folder to one on the shared file system that you may "
                "write",
            )
    return CheckpointFolder(
        asked=asked, seen=f"{asked}/{name}", here=here, made=made, problem=problem
    )

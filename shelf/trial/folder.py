"""The folder for the checkpoints of a try, inside the conf's own: made, measured and removed."""

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

    def measure(self) -> int:
        """Bytes of all files in it: of a try it holds one checkpoint."""
        files = self.here.rglob("*") if self.here is not None else ()
        return sum(file.stat().st_size for file in files if file.is_file())


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

"""The checkpoint folder of a try, inside the conf's own folder: created and removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from vjob.jobs.conf.schema import JobConf
from vjob.jobs.errors import VjobError
from vjob.jobs.submit.snapshot import find_here

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

    def remove(self) -> None:
        """Remove the folder of the try's checkpoints, and those of its parent folders that the try
        created and that are empty."""
        if self.here is not None:
            shutil.rmtree(self.here, ignore_errors=True)
        for path in self.made[1:]:
            with contextlib.suppress(OSError):  # not empty: somebody else has begun to use it
                path.rmdir()


def make_folder(conf: JobConf, base: Path) -> CheckpointFolder | None:
    """Create a folder for the checkpoints of a try; return None if the conf sets no checkpoint
    folder, and raise VjobError if it cannot be written."""
    asked = conf.train.checkpoint.folder
    if asked is None:
        return None
    name = f"{MARK}{uuid.uuid4().hex[:8]}"
    outer = find_here(asked, conf, base)
    here = None if outer is None else outer / name
    made: tuple[Path, ...] = ()
    if here is not None:
        made = tuple(path for path in (here, *here.parents) if not os.path.lexists(path))
    folder = CheckpointFolder(asked=asked, seen=f"{asked}/{name}", here=here, made=made)
    if here is not None:
        try:
            here.mkdir(parents=True)
            (here / "probe").write_bytes(b"x")
            (here / "probe").unlink()
        except OSError as error:
            folder.remove()
            raise VjobError(
                f"train.checkpoint.folder {asked} cannot be written: {error.strerror}\n"
                "set it to a folder on the shared file system that you may write"
            ) from None
    return folder

"""Whose a run is. What belongs to somebody else is shown; nothing of it is run, changed or ended.

Its files say which program takes stacks, which command notifies, which jobs are its own: whoever
may write them would decide what another user's command does, an administrator's too.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError


def is_ours(run: RunFolder) -> bool:
    """True if the folder belongs to the user of this process."""
    try:
        return os.lstat(run.path).st_uid == os.geteuid()
    except OSError:
        return False


def find_owner(run: RunFolder) -> int | None:
    """The user whose jobs the run's are; None where that cannot be known."""
    try:
        return os.lstat(run.path).st_uid
    except OSError:
        return None


def expect_ours(run: RunFolder, why: str) -> None:
    """InputError for a run of another user; `why` says what would be done for its owner."""
    if is_ours(run):
        return
    owner = name_owner(run.path)
    if owner is None:
        raise InputError(f"{run.path} is not there, or a folder above it hides it from you")
    raise InputError(f"{run.path} belongs to user {owner}: {why}; ask them to do it")


def name_owner(path: Path) -> str | None:
    """Name of the user whose file or folder it is; None where that cannot be seen."""
    try:
        number = os.lstat(path).st_uid
    except OSError:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def explain_closed(path: Path, file: str) -> str:
    """Explain what to do about a run that its owner has not shared."""
    for place in (path, *path.absolute().parents):
        owner = name_owner(place)
        if owner is not None:
            return (
                f"you may not read {path}: permission denied for {file}; "
                f"ask {owner} to run: vjob share {path} --group G"
            )
    return f"you may not read {path}: permission denied for {file}"

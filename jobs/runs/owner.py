"""Find out who owns a run. Other users' runs are shown, but nothing in them is run, changed or
ended.

A run's files name the program that takes stacks, the command that notifies, and the run's jobs:
whoever can write them would control what another user's command does, even an administrator's.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError


def is_ours(run: RunFolder) -> bool:
    """Return True if the folder belongs to the user of this process."""
    try:
        return os.lstat(run.path).st_uid == os.geteuid()
    except OSError:
        return False


def find_owner(run: RunFolder) -> int | None:
    """Return the user id of a run's owner; None if not known."""
    try:
        return os.lstat(run.path).st_uid
    except OSError:
        return None


def expect_ours(run: RunFolder, why: str) -> None:
    """Raise InputError for a run of another user; `why` says what only its owner can do."""
    if is_ours(run):
        return
    owner = name_owner(run.path)
    if owner is None:
        raise InputError(f"{run.path} is not there, or a folder above it hides it from you")
    raise InputError(f"{run.path} belongs to user {owner}: {why}; ask them to do it")


def name_owner(path: Path) -> str | None:
    """Return the name of a file's or folder's owner; None if it cannot be seen."""
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

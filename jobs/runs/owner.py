"""Whose a run is. What belongs to somebody else is shown; nothing of it is run, changed or ended.

Its files say which program takes stacks, which command notifies, which jobs are its own: whoever
may write them would decide what another user's command does, an administrator's too.
"""

from __future__ import annotations

import contextlib
import os
import pwd

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError


def is_ours(run: RunFolder) -> bool:
    """True if the folder belongs to the user of this process."""
    try:
        return os.lstat(run.path).st_uid == os.geteuid()
    except OSError:
        return False


def expect_ours(run: RunFolder, why: str) -> None:
    """InputError for a run of another user; `why` says what would be done for its owner."""
    if is_ours(run):
        return
    try:
        number = os.lstat(run.path).st_uid
    except OSError as error:
        raise InputError(f"{run.path}: {error.strerror}") from None
    owner = str(number)
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(number).pw_name
    raise InputError(f"{run.path} belongs to user {owner}: {why}; ask them to do it")

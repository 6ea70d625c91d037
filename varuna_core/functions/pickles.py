"""Write pickles atomically, readable only by their owner.

submitit's own `temporary_save_path` follows the umask, fails on files left by a killed process, and
removes the old file before the new one is in place.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

from varuna_core.records.files import PRIVATE_FILE


def write_pickle(path: Path, value: Any) -> None:
    """Write with cloudpickle, which must be installed; if this fails, the old file remains."""
    import cloudpickle

    part = path.with_name(f".{path.name}.part")
    try:
        with _open_private(part) as handle:
            cloudpickle.dump(value, handle, pickle.HIGHEST_PROTOCOL)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to show
            os.unlink(part)
        raise


def write_error(path: Path, text: str) -> None:
    """Write the result of a failed rank in submitit's format, without cloudpickle."""
    part = path.with_name(f".{path.name}.part")
    with _open_private(part) as handle:
        pickle.dump(("error", text), handle, pickle.HIGHEST_PROTOCOL)
    os.replace(part, path)


def _open_private(path: Path) -> Any:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, PRIVATE_FILE)
    os.fchmod(fd, PRIVATE_FILE)  # where a file was left, it kept its own
    return os.fdopen(fd, "wb")

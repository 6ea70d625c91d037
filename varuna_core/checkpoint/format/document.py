"""Read and write JSON files with their kind, version and checksum.

    {"varuna_checkpoint": 2, "what": "manifest", "crc32": "89abcdef", "content": {...}}

The checksum covers the content as JSON with sorted keys and no blanks.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from varuna_core.checkpoint.format.errors import (
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
)
from varuna_core.records.files import write_atomic

try:
    from isal.isal_zlib import crc32  # the same sum, several times as fast
except ImportError:
    from zlib import crc32

VERSION = 2
"""Format version of manifests and markers. Format 1, which repeats a record for each tensor, is
still read."""
MARK = "varuna_checkpoint"
BEFORE_CONTENT = ', "content": '
READABLE = 0o666
"""Mode of new files, less the user's umask. Access to checkpoints is limited by their parent
folder, which only its owner can enter (0700) if it is created here."""


def crc_text(data: Any) -> str:
    return f"{crc32(data):08x}"


def _seal(what: str, content: Any) -> str:
    """Return the document with its content in the form that the checksum covers, so that a reader
    need not render the content again."""
    text = _canonical(content)
    head = json.dumps({MARK: VERSION, "what": what, "crc32": crc_text(text.encode())})
    return f"{head[:-1]}{BEFORE_CONTENT}{text}}}\n"


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def write_document(path: Path, what: str, content: Any, durable: bool = True) -> None:
    """Write the file atomically; if `durable`, the file and its name are on the disk on return."""
    if durable:
        write_atomic(path, _seal(what, content), READABLE)
        sync_folder(path.parent)
        return
    os.replace(write_part(path, what, content), path)


def write_part(path: Path, what: str, content: Any) -> Path:
    """Write the document to a temporary file beside `path`, to be renamed; do not sync it."""
    who = f"{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(8)}"
    part = path.with_name(f".{path.name}.{who}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, READABLE)
    with os.fdopen(fd, "w", encoding="utf-8") as handle:
        handle.write(_seal(what, content))
    return part


def read_document(path: Path, what: str) -> Any:
    """Return the content; the error of an invalid file has the file's name and the reason."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_document(data, path, what)


def parse_document(data: bytes, path: Path, what: str) -> Any:
    """Return the content of a file's bytes as `read_document` does; `path` is for the errors."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is truncated or changed: it is not JSON") from error
    if not isinstance(found, dict) or MARK not in found:
        raise ForeignCheckpoint(f"{path} is not a file of a vjob checkpoint")
    version = found[MARK]
    if type(version) is int and version > VERSION:
        raise ForeignCheckpoint(
            f"{path} has format {version}, but this version reads up to {VERSION}: load it with "
            "the vjob that wrote it or a later one"
        )
    content = found.get("content")
    held = data.partition(BEFORE_CONTENT.encode())[2].rstrip()[:-1]
    expected = found.get("crc32")
    is_whole = expected == crc_text(held) or expected == crc_text(_canonical(content).encode())
    if version not in (1, VERSION) or not is_whole:
        raise DamagedCheckpoint(f"{path} was changed: its checksum differs")
    if found.get("what") != what:
        raise DamagedCheckpoint(f"{path} should be a {what} but is a {found.get('what')}")
    return content


def sync_folder(path: Path) -> None:
    """Sync new, moved and removed names in the folder, so that they survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # File systems that sync names by themselves refuse: FUSE and SMB among them.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(fd)


@contextmanager
def make_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` once it is complete."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} already exists and is not empty: give a new folder")
    part = target.with_name(f".{target.name}.{secrets.token_hex(16)}.part")
    try:
        yield part
        sync_folder(part)
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync_folder(target.parent)

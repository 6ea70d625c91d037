"""Atomic writers, and readers that cope with missing and torn files.

Run folders lie on shared file systems where a reader may see a torn last line or a missing file;
nothing here raises for those.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any, Iterator

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


def write_atomic(path: Path, text: str, mode: int = PRIVATE_FILE, *, lasts: bool = True) -> None:
    """Write a temporary file beside `path`, sync it, and rename it over `path`.

    What says only that its writer lives need not outlast a power cut: without `lasts` nobody waits
    for the disk.
    """
    part = _part_of(path)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as handle:
            handle.write(text)
            handle.flush()
            if lasts:
                os.fsync(handle.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to show
            os.unlink(part)
        raise


def _part_of(path: Path) -> Path:
    """A name beside `path` that no other host, process or thread uses, and nobody can guess."""
    who = f"{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(8)}"
    return path.with_name(f".{path.name}.{who}.part")


def write_json(path: Path, value: Any, mode: int = PRIVATE_FILE, *, lasts: bool = True) -> None:
    """`value` as indented JSON, landing atomically."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=True) + "\n", mode, lasts=lasts)


def write_first(path: Path, value: Any) -> bool:
    """Land `value` whole only if `path` does not exist yet; whether we were the first.

    A hard link fails on an existing name even over NFS; where links are unsupported the file is
    created exclusively and written in place, so that a reader may see it torn for a moment.
    """
    part = _part_of(path).with_suffix(".first")
    write_json(part, value)
    try:
        os.link(part, path)
        return True
    except FileExistsError:
        # A file server that lost its answer is asked again, and finds the link that it made.
        return os.stat(part).st_nlink > 1
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        return _create_exclusively(path, part.read_bytes())
    finally:
        os.unlink(part)


def _create_exclusively(path: Path, data: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    except FileExistsError:
        return False
    with os.fdopen(fd, "wb") as handle:
        handle.write(data)
    return True


def reserve(path: Path, size: int) -> None:
    """Fill `path` with blanks, so that `write_reserved` works on a disk that became full."""
    write_atomic(path, " " * size)


def write_reserved(reserved: Path, path: Path, value: Any) -> None:
    """Write JSON over the blanks in place, needing no new block, and rename it to `path`."""
    data = json.dumps(value, ensure_ascii=True).encode()
    with open(reserved, "r+b") as handle:
        if len(data) > os.fstat(handle.fileno()).st_size:
            raise OSError(errno.ENOSPC, "the record is larger than its reserve", str(reserved))
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(reserved, path)


def is_listed(path: Path) -> bool:
    """True if the file is there, by listing its folder.

    An NFS client may answer a plain look-up from its cache of missing names for a minute.
    """
    return path.name in list_names(path.parent)


def list_names(folder: Path) -> list[str]:
    """The names in a folder; none where it is missing."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read_json(path: Path) -> Any:
    """The parsed file, or None where it is missing, torn or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def append_line(path: Path, value: Any) -> None:
    """One JSON line in one write, so that lines of one writer never interleave."""
    line = json.dumps(value, ensure_ascii=True).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":  # torn by a disk that was full
            line = b"\n" + line
        written = os.write(fd, line)
        if written < len(line):
            raise OSError(errno.ENOSPC, "only a part of the line was written", str(path))
    finally:
        os.close(fd)


def read_lines(path: Path) -> Iterator[Any]:
    """Every whole JSON line; a torn or foreign line is passed over."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError:
            continue


@contextlib.contextmanager
def lock_file(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Exclusive lock on a file, released when the process exits; yields whether we hold it.

    Without `waits` it does not block while another process holds it. On a file system without locks
    everybody gets it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(fd)

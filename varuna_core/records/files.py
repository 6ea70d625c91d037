"""Atomic writers, and the readers of what others wrote, which have a budget of bytes and names.

Run folders lie on shared file systems where a reader may see a torn last line or a missing file;
nothing here raises for those. Readers elsewhere go through these: tests/test_architecture.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import fnmatch
import functools
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple, Type, TypeVar, Union

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
STORE_FAILED = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN)
"""Errors of a disk or file server that a later try may not meet."""
PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
MOST_BYTES = 1 << 28
"""Of a file that is read whole; none of ours is near it."""
READ_BYTES = 1 << 16
GROUP_READS = 0o040
OTHERS_READ = 0o044
SHARED_FILE = 0o640
SHARED_FOLDER = 0o2750
"""Files that are written into it belong to its group."""


def write_atomic(path: Path, text: str, mode: int = PRIVATE_FILE, *, lasts: bool = True) -> None:
    """Write a temporary file beside `path`, sync it, and rename it over `path`.

    A file that `vjob share` opened to a group stays open to it. What says only that its writer
    lives need not outlast a power cut: without `lasts` nobody waits for the disk.
    """
    try:
        _replace(path, text, mode, lasts)
    except OSError as error:
        error.filename = str(path)  # not the temporary file, which nobody asked for
        raise


def _replace(path: Path, text: str, mode: int, lasts: bool) -> None:
    part = _part_of(path)
    is_shared = _is_shared(path)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        try:
            if is_shared:
                with contextlib.suppress(OSError):  # its readers wait for the next `vjob share`
                    os.fchmod(fd, mode | GROUP_READS)
            elif mode & OTHERS_READ:
                os.fchmod(fd, mode)  # whatever the umask is
            left = memoryview(text.encode("utf-8", "surrogateescape"))
            while left:  # a file object would ask the file server for the file's attributes too
                left = left[os.write(fd, left) :]
            if lasts:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to show
            os.unlink(part)
        raise


def _is_shared(path: Path) -> bool:
    """True if the group may read the file, and new ones of its folder are the same group's."""
    try:
        old = os.lstat(path)
        return bool(
            stat.S_ISREG(old.st_mode)
            and old.st_mode & GROUP_READS
            and old.st_uid == os.geteuid()
            and os.lstat(path.parent).st_mode & stat.S_ISGID
        )
    except OSError:
        return False


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
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE)
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


def find_errno(error: BaseException) -> int:
    """Number of the system's error that this one is or was raised from; 0 without one."""
    found: Optional[BaseException] = error
    while found is not None:
        if isinstance(found, OSError) and found.errno:
            return found.errno
        found = found.__cause__
    return 0


def describe_failure(error: OSError) -> str:
    """`/scratch/a: No space left on device`, and what to do where the disk is at fault."""
    text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if error.errno in NO_ROOM:
        return f"{text}; make room there, then run it again"
    if error.errno in STORE_FAILED:
        return f"{text}: the disk or its server failed; run it again once it answers"
    return text


def describe_room(folder: Path) -> str:
    """`1.5 GB free`, of the disk where the folder is or would be; empty where nobody tells."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            facts = os.statvfs(place)
            text = f"{format_free(facts.f_bavail * facts.f_frsize)} free"
            return text + (" and no inodes" if facts.f_files and not facts.f_favail else "")
    return ""


def format_free(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


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


def scan(folder: Path) -> List["os.DirEntry[str]"]:
    """The entries of a folder; none where it is missing."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def list_files(folder: Path, pattern: str = "*") -> List[Path]:
    """The paths in a folder under such a name, sorted; nothing where the folder is missing."""
    return [folder / name for name in sorted(fnmatch.filter(list_names(folder), pattern))]


def is_closed(path: Path) -> bool:
    """True if the file is there, and this user may not read it."""
    return os.path.lexists(path) and not os.access(path, os.R_OK)


def is_foreign_link(path: Path) -> bool:
    """True for a link that another user made: it may lead to what only its reader may see."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) and found.st_uid != os.geteuid()


def open_to_read(path: Path, *, follows: bool = True) -> int:
    """Descriptor of a regular file; OSError for others, which may never end or never answer, and
    for a link that another user made, without `follows` for any link."""
    return _open_regular(path, follows)[0]


def _open_regular(path: Path, follows: bool = True) -> Tuple[int, int]:
    """Descriptor and size."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW)
    except UnicodeEncodeError:  # a name out of a damaged file
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from None
    except OSError as error:
        if error.errno != errno.ELOOP or not follows or is_foreign_link(path):
            raise
        fd = os.open(path, flags)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd, found.st_size


def open_file(path: Path, *, follows: bool = True) -> BinaryIO:
    """`open_to_read` as a file."""
    return os.fdopen(open_to_read(path, follows=follows), "rb")


def skip_hole(handle: BinaryIO) -> None:
    """Go on where the next bytes are stored: a log that was cut while its program wrote on begins
    with a hole as large as it was."""
    fd, at = handle.fileno(), handle.tell()
    raw = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        found = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:  # nothing more is stored, or the file system does not tell
        found = os.lseek(fd, 0, os.SEEK_END) if error.errno == errno.ENXIO else at
    os.lseek(fd, raw, os.SEEK_SET)  # where the handle takes it to be
    handle.seek(found)


def read_bytes(path: Path, most: int = MOST_BYTES, *, follows: bool = True) -> bytes:
    """The content of a regular file of at most so many bytes; OSError for others."""
    fd, size = _open_regular(path, follows)
    try:
        parts, left = [], most
        while size <= most and left >= 0:
            parts.append(os.read(fd, min(max(size + 1, READ_BYTES), left + 1)))
            left -= len(parts[-1])
            if not parts[-1]:
                return b"".join(parts)
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    finally:
        os.close(fd)


def read_text(path: Path, errors: str = "strict", most: int = MOST_BYTES) -> str:
    return read_bytes(path, most).decode("utf-8", errors)


def read_json(path: Path) -> Any:
    """The parsed file, or None where it is missing, torn or not JSON."""
    try:
        return parse_json(read_bytes(path))
    except OSError:
        return None


def parse_json(text: Union[str, bytes]) -> Any:
    """The value of a text that anybody may have written; None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_object(text: Union[str, bytes]) -> Dict[str, Any]:
    """The object of such a text; empty where it is none."""
    value = parse_json(text)
    return value if isinstance(value, dict) else {}


MOST_DIGITS = 18
"""What has more counts nothing that there is."""


def as_whole(text: str) -> Optional[int]:
    """The number that a text is; None for anything but a few decimal digits."""
    is_number = len(text) <= MOST_DIGITS and text.isascii() and text.isdecimal()
    return int(text) if is_number else None


T = TypeVar("T")


def expect_types(one: T) -> T:
    """A dataclass that was made of a file's JSON; TypeError where a field is not what it says.

    A number that no clock, count or size can have is refused too.
    """
    for name, kind in _list_fields(type(one)):  # type: ignore[arg-type]
        if not _is_of(getattr(one, name), kind):
            raise TypeError(f"{type(one).__name__}.{name} is no {kind}")
    return one


def make(kind: Type[T], value: Any) -> Optional[T]:
    """A dataclass of a file's JSON; None where it is of another version, or none of ours."""
    try:
        return expect_types(kind(**value)) if isinstance(value, dict) else None
    except TypeError:
        return None


def as_number(value: Any) -> Optional[float]:
    """A number of a file; None for anything else, and for a value that nothing can have."""
    return float(value) if _is_of(value, "float") else None


@functools.lru_cache(maxsize=None)
def _list_fields(kind: Any) -> Tuple[Tuple[str, str], ...]:
    return tuple((one.name, str(one.type)) for one in dataclasses.fields(kind))


def _is_of(value: Any, kind: str) -> bool:
    """By the text of the annotation, which Python 3.8 cannot always evaluate."""
    options = _cut(kind, "|")
    if len(options) > 1:
        return any(_is_of(value, option) for option in options)
    outer, _, inner = kind.strip().partition("[")
    outer, inner = outer.lower(), inner.rstrip()[:-1]
    if outer == "optional":
        return value is None or _is_of(value, inner)
    if outer in ("int", "float"):
        kinds = (int,) if outer == "int" else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < 2**63
    if outer in ("str", "bool", "none"):
        return isinstance(value, {"str": str, "bool": bool}.get(outer, type(None)))
    if outer in ("tuple", "list"):
        if not isinstance(value, (tuple, list)):
            return False
        kinds_of = _cut(inner, ",")
        if outer == "list" or kinds_of[-1] == "...":
            return all(_is_of(item, kinds_of[0]) for item in value)
        return len(value) == len(kinds_of) and all(map(_is_of, value, kinds_of))
    if outer in ("dict", "mapping"):
        key_kind, value_kind = _cut(inner, ",") if inner else ("Any", "Any")
        return isinstance(value, dict) and all(
            _is_of(key, key_kind) and _is_of(item, value_kind) for key, item in value.items()
        )
    return outer == "any" or dataclasses.is_dataclass(value)


@functools.lru_cache(maxsize=None)
def _cut(text: str, mark: str) -> Tuple[str, ...]:
    """At the marks that stand in no bracket."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "[") - (sign == "]")
        if sign == mark and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return tuple(part.strip() for part in parts)


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


MOST_LINES = 100_000
"""Of JSON, at the end of a file; a run's events are some hundreds."""


def read_lines(path: Path) -> Iterator[Any]:
    """Return the values of the last MOST_LINES lines of a file of JSON lines. A line that is cut,
    or that is not JSON, is left out."""
    try:
        data = read_bytes(path)
    except OSError:
        return
    lines = data.rsplit(b"\n", MOST_LINES)
    for line in lines[len(lines) > MOST_LINES :]:
        value = parse_json(line)
        if value is not None:
            yield value


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

"""Atomic writers, and readers of untrusted files with limits on bytes and names.

Run folders are on shared file systems, where a reader may see a torn last line or a missing file;
these readers do not raise errors for them. All other modules read through them
(tests/test_architecture.py).
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
import stat
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
    Type,
    TypeVar,
    Union,
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
STORE_FAILED = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN)
"""Errors of a disk or file server that may be gone at a retry."""
PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
MOST_BYTES = 1 << 28
"""Size limit of a file that is read whole; vjob's own files are far smaller."""
READ_BYTES = 1 << 16
GROUP_READS = 0o040
OTHERS_READ = 0o044
SHARED_FILE = 0o640
SHARED_FOLDER = 0o2750
"""Mode of a shared folder: new files in it belong to its group."""


def locate_cache(name: str, environ: Optional[Mapping[str, str]] = None) -> Path:
    """Return the folder of a cache of vjob's in the user's home, or where XDG_CACHE_HOME says."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache")) / "vjob" / name


def write_atomic(path: Path, text: str, mode: int = PRIVATE_FILE, *, lasts: bool = True) -> None:
    """Write a temporary file beside `path`, sync it, and rename it over `path`.

    A file that `vjob share` opened to a group stays readable for the group. With `lasts=False` the
    file is not synced to disk, for content such as a heartbeat that need not survive a power
    failure.
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
    """Return True if the group may read the file and new files in its folder get this group."""
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
    """Return the name of a temporary file beside `path`, which no other host, process or thread
    uses and nobody can guess."""
    who = f"{os.uname().nodename}.{os.getpid()}.{os.urandom(8).hex()}"
    return path.with_name(f".{path.name}.{who}.part")


def write_json(path: Path, value: Any, mode: int = PRIVATE_FILE, *, lasts: bool = True) -> None:
    """Write `value` atomically as indented JSON."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=True) + "\n", mode, lasts=lasts)


def write_first(path: Path, value: Any) -> bool:
    """Write `value` only if `path` does not exist yet; return True if this call created it.

    A hard link fails if the name exists, even over NFS. If links are unsupported, the file is
    created exclusively and written in place, so a reader may briefly see an incomplete file.
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
    """Fill `path` with blanks, so that `write_reserved` works even after the disk is full."""
    write_atomic(path, " " * size)


def write_reserved(reserved: Path, path: Path, value: Any) -> None:
    """Write `value` as JSON over the blanks in `reserved`, without allocating blocks, and rename
    that file to `path`."""
    data = json.dumps(value, ensure_ascii=True).encode()
    with open(reserved, "r+b") as handle:
        if len(data) > os.fstat(handle.fileno()).st_size:
            raise OSError(errno.ENOSPC, "the content exceeds the reserved space", str(reserved))
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(reserved, path)


def find_errno(error: BaseException) -> int:
    """Return the errno of this error or of the error that it was raised from; 0 without one."""
    found: Optional[BaseException] = error
    while found is not None:
        if isinstance(found, OSError) and found.errno:
            return found.errno
        found = found.__cause__
    return 0


def describe_failure(error: OSError) -> str:
    """Describe an error, such as `/scratch/a: No space left on device`, and what to do if the disk
    is at fault."""
    text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if error.errno in NO_ROOM:
        return f"{text}; make room there, then run the command again"
    if error.errno in STORE_FAILED:
        return f"{text}: the disk or its server failed; run the command again later"
    return text


def describe_room(folder: Path) -> str:
    """Return the free space, such as `1.5 GB free`, on the disk where the folder is or would be;
    empty if it is not known."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            facts = os.statvfs(place)
            text = f"{format_free(facts.f_bavail * facts.f_frsize)} free"
            return text + (" and no inodes" if facts.f_files and not facts.f_favail else "")
    return ""


def format_free(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def is_listed(path: Path) -> bool:
    """Return True if a listing of the folder contains the file.

    An NFS client may answer the lookup of a single name from its cache of missing names for a
    minute.
    """
    return path.name in list_names(path.parent)


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder; empty if it is missing."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def scan(folder: Path) -> List["os.DirEntry[str]"]:
    """Return the entries of a folder; empty if it is missing."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def list_files(folder: Path, pattern: str = "*") -> List[Path]:
    """Return the sorted paths in a folder that match a pattern; empty if the folder is missing."""
    return [folder / name for name in sorted(fnmatch.filter(list_names(folder), pattern))]


def is_closed(path: Path) -> bool:
    """Return True if the file exists but this user may not read it."""
    return os.path.lexists(path) and not os.access(path, os.R_OK)


def is_foreign_link(path: Union[str, Path]) -> bool:
    """Return True for a link of another user, which may point to a file that only the reader may
    see."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) and found.st_uid != os.geteuid()


def open_to_read(path: Union[str, Path], *, follows: bool = True) -> int:
    """Open a regular file and return its descriptor. Raise OSError for other files, whose reading
    may never end, for a link that another user made and, unless `follows` is set, for any link."""
    return _open_regular(path, follows)[0]


def _open_regular(path: Union[str, Path], follows: bool = True) -> Tuple[int, int]:
    """Return the descriptor and the size of a regular file."""
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
        raise OSError(errno.EINVAL, "the path is not a regular file", str(path))
    return fd, found.st_size


def open_file(path: Union[str, Path], *, follows: bool = True) -> BinaryIO:
    """Open a file with `open_to_read` and return a file object."""
    return os.fdopen(open_to_read(path, follows=follows), "rb")


def skip_hole(handle: BinaryIO) -> None:
    """Seek past a hole to the next stored bytes: a log that was truncated while its program kept
    writing begins with a hole as large as the removed part."""
    fd, at = handle.fileno(), handle.tell()
    raw = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        found = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:  # nothing more is stored, or the file system does not tell
        found = os.lseek(fd, 0, os.SEEK_END) if error.errno == errno.ENXIO else at
    os.lseek(fd, raw, os.SEEK_SET)  # where the handle takes it to be
    handle.seek(found)


def read_bytes(path: Path, most: int = MOST_BYTES, *, follows: bool = True) -> bytes:
    """Read a regular file of at most `most` bytes; raise OSError for other files."""
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
    """Read and parse a file; None if it is missing, torn or not JSON."""
    try:
        return parse_json(read_bytes(path))
    except OSError:
        return None


def parse_json(text: Union[str, bytes]) -> Any:
    """Parse untrusted JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_object(text: Union[str, bytes]) -> Dict[str, Any]:
    """Parse untrusted JSON text that holds an object; empty if it does not."""
    value = parse_json(text)
    return value if isinstance(value, dict) else {}


MOST_DIGITS = 18
"""Numbers with more digits are not valid counts."""


def as_whole(text: str) -> Optional[int]:
    """Convert a text to a number; None for anything but a few decimal digits."""
    is_number = len(text) <= MOST_DIGITS and text.isascii() and text.isdecimal()
    return int(text) if is_number else None


T = TypeVar("T")


def expect_types(one: T) -> T:
    """Return a dataclass that was built from JSON; raise TypeError if a field has a wrong type.

    A number that no clock, count or size can have is rejected, too.
    """
    for name, kind in _list_fields(type(one)):  # type: ignore[arg-type]
        if not _is_of(getattr(one, name), kind):
            raise TypeError(f"{type(one).__name__}.{name} is no {kind}")
    return one


def make(kind: Type[T], value: Any) -> Optional[T]:
    """Build a dataclass from a file's JSON; None if it is of another version or another format."""
    try:
        return expect_types(kind(**value)) if isinstance(value, dict) else None
    except TypeError:
        return None


def as_number(value: Any) -> Optional[float]:
    """Return a number from a file; None for anything else, and for an impossible value."""
    return float(value) if _is_of(value, "float") else None


@functools.lru_cache(maxsize=None)
def _list_fields(kind: Any) -> Tuple[Tuple[str, str], ...]:
    return tuple((one.name, str(one.type)) for one in dataclasses.fields(kind))


def _is_of(value: Any, kind: str) -> bool:
    """Return True if a value has the type that an annotation names, given as text since Python 3.8
    cannot evaluate all annotations."""
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
    """Split at each mark that is outside of brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "[") - (sign == "]")
        if sign == mark and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return tuple(part.strip() for part in parts)


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line with a single write, so that lines of one writer never interleave."""
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
"""Most lines of JSON that are read at the end of a file; a run has some hundreds of events."""


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the values of the last MOST_LINES lines of a file of JSON lines. A line that is cut or
    is not JSON is skipped."""
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
    """Hold an exclusive lock on a file, which is released when the process exits; yield True if it
    is held.

    With `waits=False` the call does not block while another process holds the lock. On a file
    system without locks every caller gets the lock.
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

"""List and remove the unpacked images on this node: `vjob container list` and `clean`.

The layout is that of containers/store.py and its prepare.sh. A node's agent holds a shared lock on
`.NAME.use` while ranks run in an image, and `.NAME.lock` is held while it is unpacked. Locked
images are not removed, and no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_core.records.files import list_files, list_names, read_text
from varuna_core.records.formatting import align_columns, format_duration, format_size
from vjob.containers.store import locate_base
from vjob.jobs.errors import InputError

Say = Callable[[str], None]
FRESH_S = 60.0
"""Seconds between the end of a preparation and the start of ranks, in which no lock is held."""
STALE_S = 86400.0
IDLE, IN_USE, PREPARING, LEFT_OVER = "idle", "in use", "being prepared", "left over"


@dataclass(frozen=True, kw_only=True)
class Root:
    """An unpacked image in the node's store, also a partial one that was left over."""

    name: str
    path: str
    state: str
    """`idle`, `in use`, `being prepared`, or `left over` from an unpacking that was killed."""
    image: str
    """The image from which the tree was unpacked; empty if not known."""
    in_place: bool
    """True for a link to an image folder, which is used in place."""
    is_stale: bool
    """True if the image has changed, so that the next run unpacks it again."""
    bytes: int
    used: float
    """When a run last asked for the image, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """Result of `clean`: the entries that were removed, and those that were kept."""

    removed: tuple[Root, ...]
    """Entries that were removed or, in a dry run, would be."""
    kept: tuple[tuple[Root, str], ...]
    """Entries that were kept, each with the reason."""

    def as_json(self) -> dict[str, Any]:
        kept = [{"name": root.name, "image": root.image, "why": why} for root, why in self.kept]
        removed = [
            {"name": root.name, "image": root.image, "bytes": root.bytes} for root in self.removed
        ]
        return {
            "removed": removed,
            "kept": kept,
            "freed_bytes": sum(root.bytes for root in self.removed),
        }


class NodeStore:
    """The user's store in one scratch folder of this node."""

    def __init__(self, scratch: str, user_id: int) -> None:
        self.base = Path(locate_base(scratch, user_id))
        self.roots = self.base / "roots"
        self._user_id = user_id

    def check(self) -> None:
        """Raise InputError if the folder is not the user's own, as prepare.sh would."""
        with contextlib.suppress(FileNotFoundError):
            facts = self.base.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != self._user_id:
                raise InputError(f"{self.base} is not a folder of yours; give another --scratch")

    def find_roots(self) -> list[Root]:
        """Return every tree, complete or left over, by name."""
        self.check()
        names = list_names(self.roots)
        return [
            root
            for name in sorted(names)
            if not name.startswith(".") and not name.endswith(".facts")
            if (root := self._look(name)) is not None
        ]

    def _look(self, name: str) -> Root | None:
        path = self.roots / name
        base = base_name(name)
        image, is_stale = self._read_facts(base)
        in_place = path.is_symlink()
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            return Root(
                name=name,
                path=str(path),
                state=self._read_state(name, base),
                image=os.readlink(path) if in_place else image,
                in_place=in_place,
                is_stale=is_stale and not in_place,
                bytes=0 if in_place else measure(path),
                used=self._read_time(path, base),
            )
        return None

    def _read_facts(self, name: str) -> tuple[str, bool]:
        """Return the image, and True if it has changed; prepare.sh wrote `PATH SIZE TIME`."""
        try:
            said = read_text(self.roots / f"{name}.facts", "replace")
            path, size, changed = said.partition("\n")[0].rsplit(" ", 2)
        except (OSError, ValueError):
            return "", False
        try:
            now = os.stat(path)
        except OSError:
            return path, False
        return path, (size, changed) != (str(now.st_size), str(int(now.st_mtime)))

    def _read_state(self, name: str, base: str) -> str:
        if is_held(self.roots / f".{base}.lock", fcntl.LOCK_SH):
            return PREPARING
        if name != base:
            return LEFT_OVER
        return IN_USE if is_held(self.roots / f".{name}.use") else IDLE

    def _read_time(self, path: Path, base: str) -> float:
        """Return the time of last use: prepare.sh opens the lock for writing at each use."""
        lock = self.roots / f".{base}.lock"
        return (lock if lock.exists() else path).lstat().st_mtime

    def remove(self, root: Root) -> str:
        """Remove a tree; return why it stays, or an empty text. Held locks show trees in use."""
        base = base_name(root.name)
        with hold(self.roots / f".{base}.lock") as is_free:
            if not is_free:
                return "the image is being prepared"
            with hold(self.roots / f".{base}.use") as is_unused:
                if root.name == base and not is_unused:
                    return "ranks run in the image"
                age = time.time() - root.used
                if root.name == base and 0 <= age < FRESH_S:
                    when = show_time(root.used)
                    return f"the image was prepared {when}, and its run may just be starting"
                return self._remove_held(Path(root.path), base)

    def _remove_held(self, path: Path, base: str) -> str:
        mounted = find_mounts(path, read_text(Path("/proc/self/mountinfo"), "replace"))
        if mounted:
            return f"a file system is mounted inside the image: first run umount {mounted[0]}"
        if path.is_symlink():
            path.unlink(missing_ok=True)
            return ""
        if path.name == base:  # from here on nobody takes half of it for a whole one
            torn = path.with_name(f"{base}.part.old.{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):
                path.rename(torn)
            path.with_name(f"{base}.facts").unlink(missing_ok=True)
            path.with_name(f".{base}.use").unlink(missing_ok=True)
            path = torn
        try:
            remove_tree(path)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            return f"{why}; `podman unshare rm -rf {path}` removes files of mapped users"
        return ""

    def sweep(self) -> None:
        """Remove leftovers of killed runs and their tools beside the trees, if older than a day."""
        for name in ("conf", "runtime", "temp", "cache"):
            folder = self.base / name
            if folder.is_dir() and not folder.is_symlink():
                for path in list_files(folder):
                    with contextlib.suppress(OSError):
                        if time.time() - path.lstat().st_mtime > STALE_S:
                            remove_tree(path)


def base_name(name: str) -> str:
    """Return the name of a finished or partial tree: `vjob-1a2b` for `vjob-1a2b.part.77`."""
    return name.partition(".part.")[0]


def is_held(path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Return True if another process holds a lock that excludes this kind of lock."""
    with hold(path, kind, make=False) as is_free:
        return not is_free


@contextlib.contextmanager
def hold(path: Path, kind: int = fcntl.LOCK_EX, *, make: bool = True) -> Iterator[bool]:
    """Hold a lock, exclusive by default; yield False if another holder prevents it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def find_mounts(path: Path, mountinfo: str) -> list[str]:
    """Return the mount points in a folder; /proc escapes spaces and similar as octal."""
    found = []
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) > 4:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            if point == str(path) or point.startswith(f"{path}/"):
                found.append(point)
    return found


def measure(path: Path) -> int:
    """Return the bytes on disk; hard links count once, and unreadable files do not count."""
    seen: set[tuple[int, int]] = set()
    total = 0
    todo = [str(path)]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    facts = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    elif facts.st_nlink > 1:
                        if (facts.st_dev, facts.st_ino) in seen:
                            continue
                        seen.add((facts.st_dev, facts.st_ino))
                    total += facts.st_blocks * 512
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.ENOENT, errno.ENOTDIR):
                raise
    return total


def remove_tree(path: Path) -> None:
    """Remove a folder with all below it, also folders of mode 000; links are not followed."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            _empty(str(path))
            path.rmdir()
        else:
            path.unlink()


def _empty(folder: str) -> None:
    with contextlib.suppress(PermissionError):  # another's: then listing it tells
        os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    _empty(entry.path)
                    os.rmdir(entry.path)
                else:
                    os.unlink(entry.path)


def clean(
    store: NodeStore,
    say: Say,
    *,
    image: str | None = None,
    everything: bool = False,
    older_than_days: float | None = None,
    dry_run: bool = False,
) -> Cleaned:
    """Remove the images asked for, and report the result for each."""
    if sum((image is not None, everything, older_than_days is not None)) != 1:
        raise InputError("say what to remove: an IMAGE, --older-than DAYS, or --all")
    roots = store.find_roots()
    limit = time.time() - (older_than_days or 0) * 86400
    chosen = [
        root
        for root in roots
        if everything
        or (older_than_days is not None and root.used < limit)
        or (image is not None and is_named(root, image))
    ]
    if image is not None and not chosen:
        known = ", ".join(root.name for root in roots) or "nothing"
        raise InputError(f"{image} is not in {store.roots}, which holds {known}")
    removed, kept, freed = [], [], 0
    for root in chosen:
        what = f"{root.name}  {format_size(root.bytes)}  {root.image}".rstrip()
        why = _would_stay(root) if dry_run else store.remove(root)
        if why:
            kept.append((root, why))
            say(f"kept {what}: {why}")
        else:
            removed.append(root)
            freed += root.bytes
            say(f"{'would remove' if dry_run else 'removed'} {what}")
    if everything and not kept and not dry_run:
        store.sweep()
    say(f"{format_size(freed)} {'would be ' if dry_run else ''}freed in {store.roots}")
    return Cleaned(removed=tuple(removed), kept=tuple(kept))


def is_named(root: Root, name: str) -> bool:
    """Return True if a word names a tree or its image, in whatever spelling of the path."""
    if name in (root.name, base_name(root.name), root.image):
        return True
    return bool(root.image) and os.path.realpath(name) == os.path.realpath(root.image)


def describe(root: Root) -> tuple[str, str, str, str, str]:
    """Return a row of `vjob container list`."""
    size = "in place" if root.in_place else format_size(root.bytes)
    image = root.image + (" (has changed since)" if root.is_stale else "")
    return root.name, size, show_time(root.used), root.state, image


def _would_stay(root: Root) -> str:
    return f"it is {root.state}" if root.state in (IN_USE, PREPARING) else ""


def render_table(head: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table below a head line, each column as wide as its longest cell."""
    if not rows:
        return f"{head}: nothing"
    return "\n".join([head, *(f"  {line}" for line in align_columns([titles, *rows]))])


def show_time(moment: float) -> str:
    """Format the age of a time, such as `3 h ago`."""
    return f"{format_duration(time.time() - moment)} ago"

"""Files of an image, in a folder or in a squashfs file, without starting anything of it.

Paths are those inside. Links are followed as the image's own programs would follow them: an
absolute one starts at its root and none leads out of it, to a file of this machine. Of a squashfs
file only the small files that are read are unpacked.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

from vjob.jobs import process
from vjob.jobs.errors import InputError, VjobError

MOST_LINKS = 40
"""As Linux itself allows."""
MOST_BYTES = 1 << 20
"""Of a file that is read: metadata are far smaller."""
LIST_S = 600.0
"""An image of 20 GB on a slow file server."""

Folder = Mapping[str, str | None]
"""Names in a folder; of a link its target."""


class Contents(ABC):
    """Files of one image."""

    @abstractmethod
    def _list(self, folder: str) -> Folder:
        """A folder by its path without links; empty for none, or one that may not be read."""

    @abstractmethod
    def _read(self, path: str) -> str:
        """A regular file by its path without links; empty for none."""

    def resolve(self, path: str) -> str | None:
        """The same path without links; None where nothing is there."""
        done: list[str] = []
        left = path.split("/")[::-1]
        num_links = 0
        while left:
            name = left.pop()
            if name == "..":
                del done[-1:]
            elif name not in ("", "."):
                folder = self._list("/".join(done))
                if name not in folder:
                    return None
                target = folder[name]
                if target is None:
                    done.append(name)
                    continue
                num_links += 1
                if num_links > MOST_LINKS:
                    return None
                if target.startswith("/"):
                    done.clear()
                left += target.split("/")[::-1]
        return "/".join(done)

    def exists(self, path: str) -> bool:
        return self.resolve(path) is not None

    def list_names(self, folder: str) -> list[str]:
        """Sorted names in a folder; none where it is not there."""
        real = self.resolve(folder)
        return [] if real is None else sorted(self._list(real))

    def find(self, pattern: str) -> list[str]:
        """Existing paths that match, component by component, with `*` in names."""
        found = [""]
        for part in pattern.strip("/").split("/"):
            if "*" in part:
                found = [
                    f"{folder}/{name}"
                    for folder in found
                    for name in fnmatch.filter(self.list_names(folder), part)
                ]
            else:
                found = [f"{folder}/{part}" for folder in found]
        return [path for path in found if self.exists(path)]

    def read(self, path: str) -> str:
        """Text of a file; empty where there is none."""
        real = self.resolve(path)
        return "" if not real else self._read(real)


class FolderContents(Contents):
    """An unpacked image."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._folders: dict[str, Folder] = {}

    def _list(self, folder: str) -> Folder:
        if folder not in self._folders:
            self._folders[folder] = self._scan(os.path.join(self._root, folder))
        return self._folders[folder]

    def _scan(self, path: str) -> Folder:
        try:
            with os.scandir(path) as entries:
                return {
                    entry.name: os.readlink(entry.path) if entry.is_symlink() else None
                    for entry in entries
                }
        except OSError:
            return {}

    def _read(self, path: str) -> str:
        return read_regular(os.path.join(self._root, path))


class SquashfsContents(Contents):
    """An image file; VjobError where unsquashfs is missing or cannot read it."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)
        done = _run("unsquashfs", "-ll", self._file)
        if done.code != 0:
            said = (done.err.strip() or done.out.strip()).splitlines()[-1:] or ["no message"]
            raise VjobError(f"unsquashfs cannot list {file}: {said[0]}")
        self._folders = parse_listing(done.out.splitlines())

    def _list(self, folder: str) -> Folder:
        return self._folders.get(folder, {})

    def _read(self, path: str) -> str:
        with tempfile.TemporaryDirectory(prefix="vjob-image-") as folder:
            target = os.path.join(folder, "root")
            # Not -cat: squashfs-tools before 4.5 have none.
            words = ("-no-progress", "-no-xattrs", "-dest", target, self._file)
            _run("unsquashfs", *words, escape_pattern(path))
            return read_regular(os.path.join(target, path))


_LINE = re.compile(r"([a-z-])[a-zA-Z-]{9} .*? \d{4}-\d\d-\d\d \d\d:\d\d squashfs-root/(.+)")


def parse_listing(lines: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """Folders by their path, from the output of `unsquashfs -ll`."""
    found: dict[str, dict[str, str | None]] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        path, target = match[2], None
        if match[1] == "l":
            path, _, target = path.partition(" -> ")
        folder, _, name = path.rpartition("/")
        found.setdefault(folder, {})[name] = target
    return found


def escape_pattern(path: str) -> str:
    """unsquashfs takes names as patterns of a shell."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", path)


def read_regular(path: str) -> str:
    """The first MiB of a regular file; empty for anything else, such as a pipe or a link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        with open(fd, "rb", closefd=False) as handle:
            return handle.read(MOST_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


def _run(*command: str) -> process.Result:
    try:
        return process.run(command, timeout_s=LIST_S)
    except VjobError as error:
        if "not on PATH" not in str(error):
            raise
        raise InputError(
            f"{command[0]} is not on PATH, and reads image files: an admin installs "
            "squashfs-tools; or unpack the image elsewhere and name the folder"
        ) from None

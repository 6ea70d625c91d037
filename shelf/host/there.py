"""The login node's side of `vjob --host`, which the laptop's side starts over ssh as `vjob there`.

without words      a working tree is brought up to date: names and digests come, then the
                   files that differ, as a tar stream
--in FOLDER WORDS  a command in that folder of the home folder, in the terminal of the laptop
--page  a command whose page goes back, in a tar stream
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import click

from varuna_core.records.files import PRIVATE_FOLDER, lock_file, read_json, write_json
from vjob.jobs import process
from vjob.jobs.errors import InputError
from vjob.shelf.host.frames import add_file, read_line, write_line

PLACE = "vjob"
"""Folder in the home folder that has a folder for each working tree of a laptop."""
SENT = ".vjob-sent.json"
LOCK_S = 60.0
"""Seconds to wait for an earlier connection of the same working tree to send its files."""
POLL_S = 0.1
MADE_S = 3600.0
"""The longest time in seconds that a page may take."""


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.option("--in", "folder")
@click.option("--page")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def there(folder: str | None, page: str | None, words: tuple[str, ...]) -> None:
    """Answer a `vjob --host` of another machine."""
    if not words:
        receive_tree(sys.stdin.buffer, sys.stdout.buffer)
        return
    os.chdir(Path.home() / (folder or "."))
    if page is not None:
        send_made(words, page, sys.stdout.buffer)
        return
    command = process.build_own_command(*words)
    os.execv(command[0], command)


def send_made(words: tuple[str, ...], page: str, answers: BinaryIO) -> None:
    """Run a command, and send its output and the page that it made."""
    with tempfile.TemporaryDirectory(prefix="vjob-host-") as made:
        command = process.build_own_command(*words, "-o", f"{made}/{page}")
        done = process.run(command, timeout_s=MADE_S)
        sys.stderr.write(done.err.replace(f"{made}/", ""))
        write_line(answers, said=done.out.replace(f"{made}/", ""), code=done.code)
        with tarfile.open(fileobj=answers, mode="w|") as tar:
            for path in Path(made).iterdir():
                add_file(tar, path.name, path.read_bytes())


# The working tree.


def receive_tree(said: BinaryIO, answers: BinaryIO) -> None:
    """Make the folder's files equal to the laptop's; only differing ones are sent."""
    request = read_line(said)
    if request is None:
        raise InputError("this command is run by vjob --host LOGIN, and not by hand")
    name, files, links = check_request(request)
    base = Path.home() / PLACE / name
    base.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    with _lock(base):
        sent = read_json(base / SENT)
        before: dict[str, Any] = sent if isinstance(sent, dict) else {}
        is_here = {name for name in files if _is_same(base, name, before, files[name])}
        wanted = [name for name in files if name not in is_here]
        write_line(answers, want=wanted)
        after = {name: before[name] for name in is_here}
        with contextlib.suppress(tarfile.ReadError), tarfile.open(fileobj=said, mode="r|") as tar:
            for info in tar:
                data = tar.extractfile(info)
                if data is not None and info.name in wanted:
                    mtime = _write_file(base, info.name, data.read(), files[info.name][1])
                    after[info.name] = [*files[info.name], mtime]
        if files.keys() - after.keys():
            raise InputError("the connection ended while files were being sent")
        for name, target in links.items():
            _write_link(base, name, target)
            after[name] = target
        for name in sorted(before.keys() - after.keys()):
            _remove(base, name, before[name])
        write_json(base / SENT, after)
    write_line(answers, done=True)


def check_request(
    said: Mapping[str, Any],
) -> tuple[str, dict[str, tuple[int, int, str]], dict[str, str]]:
    """Return the tree's name, size, mode and digest of each file, and the links; raise InputError
    for an invalid request."""
    try:
        files = {str(name): (int(a), int(b), str(c)) for name, (a, b, c) in said["files"].items()}
        links = {str(name): str(target) for name, target in said["links"].items()}
        tree = str(said["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"not a request from vjob --host: {error!r}") from None
    for name in (*files, *links, tree):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise InputError(f"not a request from vjob --host: {name}")
    return tree, files, links


@contextlib.contextmanager
def _lock(base: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_S
    while True:
        with lock_file(base / ".vjob-lock", waits=False) as is_ours:
            if is_ours:
                yield
                return
        if time.monotonic() > deadline:
            raise InputError(
                f"another vjob --host has been copying into {base} for {LOCK_S:.0f} s; if its "
                "connection is dead, end the other `vjob there` on the login node"
            )
        time.sleep(POLL_S)


def _is_same(base: Path, name: str, before: Mapping[str, Any], facts: tuple[int, int, str]) -> bool:
    """Return True for a file that was sent like this and has not been changed here."""
    size, mode, digest = facts
    known = before.get(name)
    if not isinstance(known, list) or known[:3] != [size, mode, digest]:
        return False
    try:
        found = (base / name).lstat()
    except OSError:
        return False
    return found.st_size == size and found.st_mtime_ns == known[3]


def _write_file(base: Path, name: str, data: bytes, mode: int) -> int:
    path = _make_place(base, name)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as handle:
        handle.write(data)
        os.fchmod(handle.fileno(), 0o600 | mode & 0o700)
    os.replace(part, path)
    return path.lstat().st_mtime_ns


def _write_link(base: Path, name: str, target: str) -> None:
    path = _make_place(base, name)
    if path.is_symlink() and os.readlink(path) == target:
        return
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.symlink_to(target)


def _make_place(base: Path, name: str) -> Path:
    """Return the path of a file, making its folders and removing whatever is in the way."""
    path = base / name
    for above in reversed(path.relative_to(base).parents):
        folder = base / above
        if folder != base and (folder.is_symlink() or folder.is_file()):
            folder.unlink()
    path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    return path


def _remove(base: Path, name: str, known: object) -> None:
    """Remove a file that the laptop no longer has, unless it was changed here."""
    path = base / name
    with contextlib.suppress(OSError):
        is_ours = isinstance(known, str) and path.is_symlink()
        if isinstance(known, list):
            is_ours = path.lstat().st_mtime_ns == known[3]
        if is_ours:
            path.unlink()
            for folder in path.relative_to(base).parents:
                if folder.parts:
                    (base / folder).rmdir()

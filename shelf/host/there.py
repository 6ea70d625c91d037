"""The login node's side of `vjob --host`: files are brought up to date, a command is run, and what
it prints is sent back.

    frames in   request ─► files that are wanted ─► a signal, perhaps
    frames out  want    ─► what the command prints, a page, its exit code

The command is a process of its own: it goes on where the connection breaks. What it prints stands
in files under the request's key, so that another connection with this key goes on reading where
the first one stopped, and starts nothing a second time.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import click

from varuna_core.records.files import PRIVATE_FOLDER, lock_file, read_json, write_json
from vjob.jobs import process
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers import run_index
from vjob.shelf.host.frames import read_frame, write_frame

PLACE = "vjob"
"""In the home folder: one folder for each working tree of a laptop."""
SENT = ".vjob-sent.json"
KEPT_S = 7 * 86400.0
"""How long answers of earlier commands are kept."""
LOCK_S = 60.0
"""For an earlier connection of the same working tree to have brought its files."""
POLL_S = 0.1
MOST_BYTES = 1 << 20
"""Of output, in a frame."""
PAGE = "page.html"
PICTURE = "page.png"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the laptop asks for."""

    key: str
    words: tuple[str, ...]
    """Of the command, after `vjob`."""
    name: str = ""
    """Of the working tree's folder here; empty where no files come along."""
    folder: str = "."
    """Where in it the command runs."""
    files: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """Size, mode and digest of each."""
    links: Mapping[str, str] = field(default_factory=dict)
    page: str = ""
    """What the page that the command writes is called on the laptop."""
    picture: str = ""
    """What its picture is called there."""
    columns: int = 0
    """Of the terminal there; 0 where the output goes elsewhere."""
    out: int = 0
    err: int = 0
    """Bytes that an earlier connection has brought."""


def parse_request(said: Mapping[str, Any]) -> Request:
    """Raises InputError for what no vjob sends."""
    try:
        request = Request(
            key=str(said["key"]),
            words=tuple(map(str, said["words"])),
            name=str(said["name"]),
            folder=str(said["folder"]),
            files={str(name): _parse_facts(facts) for name, facts in said["files"].items()},
            links={str(name): str(target) for name, target in said["links"].items()},
            page=str(said["page"]),
            picture=str(said.get("picture", "")),
            columns=int(said["columns"]),
            out=int(said["out"]),
            err=int(said["err"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"no request of a vjob --host: {error!r}") from None
    if not re.fullmatch(r"[0-9a-f]{32}", request.key):
        raise InputError("no request of a vjob --host: its key")
    names = [*request.files, *request.links, request.name or "x", request.folder]
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or (not path.parts and name != "."):
            raise InputError(f"no request of a vjob --host: {name}")
    return request


def _parse_facts(facts: Sequence[Any]) -> tuple[int, int, str]:
    size, mode, digest = facts
    return int(size), int(mode), str(digest)


@click.command(hidden=True)
def there() -> None:
    """Answer a `vjob --host` of another machine, on standard input and output."""
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(said: BinaryIO, answers: BinaryIO) -> None:
    """One connection."""
    frame = read_frame(said)
    if frame is None:
        raise InputError("this command is run by vjob --host LOGIN; it says nothing to people")
    request = parse_request(frame[0])
    kept = run_index.folder() / "host" / request.key
    kept.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    forget_old(kept.parent)
    if not (kept / "pid").exists():
        base = Path.home()
        if request.name:
            base = base / PLACE / request.name
            base.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            update_tree(base, request, said, answers)
        with _lock(kept):
            if not (kept / "pid").exists():  # an earlier connection may have started it meanwhile
                _start(kept, base / request.folder, request)
    write_frame(answers, started=True)
    pass_on(kept, request, said, answers)


def forget_old(folder: Path) -> None:
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > KEPT_S:
                shutil.rmtree(old, ignore_errors=True)


# The working tree.


def update_tree(base: Path, request: Request, said: BinaryIO, answers: BinaryIO) -> None:
    """Make the folder's files those of the laptop; only what differs is sent."""
    with _lock(base):
        sent = read_json(base / SENT)
        before: dict[str, Any] = sent if isinstance(sent, dict) else {}
        is_here = {name for name in request.files if _is_same(base, name, before, request)}
        wanted = [name for name in request.files if name not in is_here]
        write_frame(answers, want=wanted)
        after = {name: before[name] for name in is_here}
        for _ in wanted:
            frame = read_frame(said)
            if frame is None:
                raise InputError("the connection ended amid the files")
            name, data = str(frame[0]["file"]), frame[1]
            size, mode, digest = request.files[name]
            mtime = _write_file(base, name, data, mode)
            after[name] = [size, mode, digest, mtime]
        for name, target in request.links.items():
            _write_link(base, name, target)
            after[name] = target
        for name in sorted(before.keys() - after.keys()):
            _remove(base, name, before[name])
        write_json(base / SENT, after)


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
                f"another vjob --host has been copying into {base} for {LOCK_S:.0f} s; "
                "where its connection is dead, end the other `vjob there` on the login node"
            )
        time.sleep(POLL_S)


def _is_same(base: Path, name: str, before: Mapping[str, Any], request: Request) -> bool:
    """True for a file that was sent like this, and that nobody has touched here."""
    size, mode, digest = request.files[name]
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
    """The path of a file, its folders made; what stands in the way goes."""
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
    """A file that the laptop has no more, unless it was changed here."""
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


# The command.


def _start(kept: Path, folder: Path, request: Request) -> None:
    page = ["-o", str(kept / PAGE)] if request.page else []
    page += ["--png", str(kept / PICTURE)] if request.picture else []
    width = str(request.columns or "")
    env = {**os.environ, "COLUMNS": width, "VJOB_WIDTH": width}
    command = process.build_own_command(*request.words, *page)
    process.start_kept(command, folder, kept, env=env)


def pass_on(kept: Path, request: Request, said: BinaryIO, answers: BinaryIO) -> None:
    """Send what the command prints as it comes, and its code once it has ended."""
    places = {"out": request.out, "err": request.err}
    while True:
        ended = (kept / "code").exists()
        is_lost = not ended and not _is_living(kept)
        for name in places:
            while data := _read(kept / name, places[name]):
                shown = _rename_page(data, kept, request)
                write_frame(answers, shown, to=name, place=places[name] + len(data))
                places[name] += len(data)
        if ended:
            code = int((kept / "code").read_text())
            if request.page and (kept / PAGE).exists():
                write_frame(answers, (kept / PAGE).read_bytes(), page=True)
            if request.picture and (kept / PICTURE).exists():
                write_frame(answers, (kept / PICTURE).read_bytes(), picture=True)
            write_frame(answers, code=code)
            return
        if is_lost and not (kept / "code").exists():
            write_frame(answers, lost=True)
            return
        if select.select([said], [], [], POLL_S)[0]:
            frame = read_frame(said)
            if frame is None:
                return  # the connection broke: the next one goes on
            _send_signal(kept, str(frame[0].get("signal")))


def _read(path: Path, place: int) -> bytes:
    try:
        with path.open("rb") as handle:
            handle.seek(place)
            return handle.read(MOST_BYTES)
    except FileNotFoundError:
        return b""


def _rename_page(data: bytes, kept: Path, request: Request) -> bytes:
    for name, shown in ((PAGE, request.page), (PICTURE, request.picture)):
        if shown:
            data = data.replace(os.fsencode(kept / name), shown.encode())
    return data


def _find_pid(kept: Path) -> int | None:
    """The command's process; None on another machine, where several answer to one name."""
    words = (kept / "pid").read_text().split()
    return int(words[0]) if words[1:] == [os.uname().nodename] else None


def _is_living(kept: Path) -> bool:
    """True on another machine too: there is no asking, and its code will show."""
    try:
        pid = _find_pid(kept)
        if pid is not None:
            os.kill(pid, 0)
    except (OSError, ValueError):
        return False
    return True


def _send_signal(kept: Path, name: str) -> None:
    number = {"INT": signal.SIGINT, "TERM": signal.SIGTERM}.get(name)
    if number is not None:
        with contextlib.suppress(OSError, ValueError):
            pid = _find_pid(kept)
            if pid is not None:
                os.killpg(pid, number)

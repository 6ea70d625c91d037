"""`vjob container import`: fetch an image from a registry once, for all nodes and runs.

enroot does the work and alone handles credentials. The file lands in a folder on the file system
that the nodes share, whole or not at all; a second import of the same reference waits for the
first. Refuses what needs no import: podman, docker, apptainer and pyxis take references.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from varuna_core.facts.catalogue.known_line import Scope
from varuna_core.facts.remedy import Context
from varuna_core.records.files import list_files, open_to_read
from vjob.containers.reference import Reference
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.images.image import explain_damage, read_reference
from vjob.jobs.known_lines import load_catalogue
from vjob.jobs.process import Result, run_shown

Say = Callable[[str], None]

TICK_S = 10.0
"""Seconds between messages while a silent tool works."""


def import_image(
    text: str, target: Path, say: Say, *, arch: str | None = None, again: bool = False
) -> Path:
    """Return a reference's image file, fetching it if it does not exist yet, or with `again`."""
    reference = read_reference(text)
    if target.is_file() and not again:
        say(f"{target} already exists; use --again to fetch it again")
        return target
    if shutil.which("enroot") is None:
        raise InputError(
            "enroot is not on PATH here: import on a node that has it, as in\n"
            f"  srun -N1 vjob container import {shlex.quote(text)}\n"
            "  podman, docker, apptainer and pyxis take the reference itself and need no import"
        )
    make_folder(target.parent)
    before = _identify(target)
    with lock_file(target, say):
        if target.is_file() and _identify(target) != before:
            say(f"another import has just made {target}")
            return target
        for old in list_files(target.parent, f".{target.name}.*.part"):
            old.unlink(missing_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            _fetch(reference, part, arch, say)
            land(part, target)
        finally:
            part.unlink(missing_ok=True)
    return target


def _fetch(reference: Reference, part: Path, arch: str | None, say: Say) -> None:
    words = ["enroot", "import", *(["--arch", arch] if arch else []), "--output", str(part)]
    with tempfile.TemporaryDirectory(prefix="vjob-import-") as folder:
        env = build_environment(reference, folder, os.environ)
        result = run_shown([*words, reference.enroot], say, env=env, tick=Ticker(part, say).tick)
    if result.code != 0:
        raise explain_failure(f"enroot import {reference.enroot}", result, "enroot")


def explain_failure(what: str, result: Result, runtime: str) -> VjobError:
    """Return an error with the last line of a tool's output and, if known, what to do."""
    last = (result.out.splitlines() or ["without a word"])[-1].strip()
    row = load_catalogue().match(Scope.CONTAINER, result.out, [runtime])
    remedy = f"\n  {row.explain(Context.CONF)}" if row is not None else ""
    return VjobError(f"{what} ended with {result.code}: {last}{remedy}")


def build_environment(
    reference: Reference, folder: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment for enroot: the user's variables, and a runtime folder in `folder` if
    they name none, since /run may not be writable."""
    env = {"ENROOT_RUNTIME_PATH": f"{folder}/runtime", **environ}
    podman = shutil.which("podman")
    if reference.scheme == "podman" and podman:
        # At its end enroot 4.1.2 removes the container that it made by `docker rm`, even podman's.
        os.symlink(podman, f"{folder}/docker")
        env["PATH"] = f"{folder}:{environ.get('PATH', os.defpath)}"
    return env


def land(part: Path, target: Path) -> None:
    """Rename a complete image file to its final name."""
    try:
        damage = explain_damage(part)
    except OSError as error:
        damage = f"cannot be read: {error.strerror}"
    if damage:
        raise VjobError(f"the file made for {target} {damage}")
    fd = open_to_read(part)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(part, target)


def _identify(path: Path) -> tuple[int, int] | None:
    """Return inode and time of the last change, which distinguish a file from a later one of the
    same name; None if the file cannot be examined."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VjobError(f"{folder} cannot be made: {error.strerror}") from None


@contextlib.contextmanager
def lock_file(target: Path, say: Say) -> Iterator[None]:
    """Hold an exclusive lock while making a file; without locks in the file system, hold none."""
    path = target.with_name(f".{target.name}.lock")
    fd = _open_locked(path, target, say)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _open_locked(path: Path, target: Path, say: Say) -> int:
    """Open and lock the lock's file; repeat if its former holder removed it meanwhile."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise VjobError(f"{path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another command is making {target}: waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)


class Ticker:
    """Reports how long silent work has taken, and the present size of its file."""

    def __init__(self, path: Path, say: Say) -> None:
        self._path, self._say = path, say
        self._begun = self._said = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._said < TICK_S:
            return
        self._said = now
        size = self._path.stat().st_size if self._path.is_file() else 0
        written = f", {size >> 20} MiB written" if size else ""
        self._say(f"... {now - self._begun:.0f} s{written}")

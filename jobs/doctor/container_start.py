"""Whether a container runtime really starts one on this machine: tried, without any image.

The root folder is made of this machine's own /usr, mounted read-only into a skeleton, and what is
run are the very commands that a plan holds for a node.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vjob.containers.runtime import Commands, ImageKind, Mount, Request, Runtime
from vjob.jobs.finding import try_out
from vjob.jobs.images.store import remove_tree

START_S = 60.0
FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "var")
OF_HOST = ("usr", "bin", "lib", "lib32", "lib64", "sbin")
"""Whatever a program of this machine needs; links on most systems now."""


def try_start(kind: type[Runtime], scratch: str) -> str:
    """What it said where it does not start a container, or nothing."""
    with make_room(scratch) as folder:
        mounts = make_skeleton(folder / "root", Path("/"))
        commands = kind().plan(build_request(folder, mounts))
        env = build_environment(commands, os.environ)
        try:
            for words in (*commands.prepare, (*commands.start, "/bin/sh", "-c", ":")):
                code, said = try_out(fill_in(words), env, START_S)
                if code != 0:
                    return said.strip() or f"{words[0]} ended with {code}"
        finally:
            for words in commands.clean:
                try_out(fill_in(words), env, START_S)
    return ""


@contextlib.contextmanager
def make_room(scratch: str) -> Iterator[Path]:
    """A folder below scratch, as a run's store would be."""
    folder = Path(tempfile.mkdtemp(prefix="vjob-doctor-", dir=scratch))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # podman's notes may belong to mapped users
            remove_tree(folder)


def make_skeleton(root: Path, host: Path) -> tuple[Mount, ...]:
    """Empty folders and the machine's own links; what must be mounted to make a system of it."""
    mounts = []
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    for name in OF_HOST:
        path = host / name
        if path.is_symlink():
            (root / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            (root / name).mkdir()
            mounts.append(Mount(source=str(path), target=f"/{name}", read_only=True))
    return tuple(mounts)


def build_request(folder: Path, mounts: tuple[Mount, ...]) -> Request:
    return Request(
        run="doctor",
        image=str(folder / "root"),
        kind=ImageKind.FOLDER,
        mounts=mounts,
        workdir="/",
        writable=False,
        remap_root=False,
        reuse="auto",
        gpus=False,
        user_id=os.getuid(),
        scratch=str(folder),
        stamp="",
    )


def build_environment(commands: Commands, environ: Mapping[str, str]) -> dict[str, str]:
    """As the agent would have it; Slurm's and Python's variables are for jobs."""
    base = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM", "SBATCH", "PYTHON"))
    }
    base.setdefault("USER", str(os.getuid()))
    return {**base, **commands.env, commands.enter_as: ":"}


def fill_in(words: Sequence[str]) -> tuple[str, ...]:
    """What the agent fills in on a node: `%{node}` and the like."""
    return tuple(re.sub(r"%\{\w+\}", "doctor", word) for word in words)

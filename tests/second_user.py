"""Another user of the machine, who shares a group with the owner of a run: what they can do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT

USERS, STRANGER = 100, 65534
READ_ALL = """
import os, sys
for top in sys.argv[1:]:
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.access(path, os.R_OK):
                print(path, ascii(open(path, "rb").read()))
"""


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other users may pass; pytest closes its own whenever one starts.

    Its name looks drawn by chance, as those of temporary folders do.
    """
    folder = Path(tempfile.mkdtemp(prefix="vjob-users-q7Zm4Tk9Xw2Lr8Bn5V"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Colleague:
    """Runs commands as a user who has no more than the group, from a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.chown(folder, STRANGER, STRANGER)
        folder.chmod(0o700)

    def run(
        self, *command: str, group: int = USERS, timeout_s: float = 150, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.build_command(*command, group=group),
            cwd=self.folder,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": str(self.folder),
                "XDG_STATE_HOME": str(self.folder),
                **env,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
        )

    def build_command(self, *command: str, group: int = USERS) -> list[str]:
        return [
            "setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", f"--groups={group}", *command
        ]  # fmt: skip

    def vjob(
        self, *words: str, group: int = USERS, timeout_s: float = 150
    ) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "vjob", *words, group=group, timeout_s=timeout_s)

    def read_everything(self, *folders: Path) -> bytes:
        """Every byte that they can read in these folders, with the files' paths."""
        words = [sys.executable, "-c", READ_ALL, *map(str, folders)]
        return self.run(*words).stdout.encode("utf-8", "surrogateescape")


@contextmanager
def make_colleague() -> Iterator[Colleague]:
    """Skips where nobody may become another user, or that one may not run our Python."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, with setpriv")
    with open_folder() as folder:
        colleague = Colleague(folder)
        done = colleague.run(sys.executable, "-c", "import click, json, yaml, vjob")
        if done.returncode:
            pytest.skip(f"another user cannot run {sys.executable}: {done.stderr[-200:]}")
        yield colleague

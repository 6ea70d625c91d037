"""podman and docker for real: images of their own stores, and what a killed client leaves."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.command import wait_for
from tests.containers.real import Tools
from tests.containers.request import make_request
from tests.containers.test_behaviour import Box
from vjob.containers.registry import RUNTIMES
from vjob.containers.runtime import Argv, ImageKind

with_stores = pytest.mark.parametrize(
    "runtime",
    [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("podman", "docker")],
)

DEAF = """trap "" TERM; exec python3 -c "import time; time.sleep(300)" "$0" """
"""For of rootless podman's two clients the inner sends a TERM on, once the outer is killed."""


@with_stores
def test_an_image_runs_as_you_without_its_entrypoint(
    runtime: str, tools: Tools, tmp_path: Path, scratch: Path
) -> None:
    tools.need(runtime)
    box = Box(runtime, tmp_path, tools.make_reference(runtime), scratch, tools.path)
    for row in box.look("  writable: false\n"):
        assert row["uid"] == os.getuid()
        assert row["env"]["FROM_IMAGE"] == "made of dough"
        assert (row["writes_root"], row["writes_tmp"]) == (False, True)


@with_stores
def test_what_a_killed_client_left_is_ended_by_the_next_attempt(
    runtime: str, tools: Tools, tmp_path: Path, scratch: Path
) -> None:
    """A killed agent's clients die with it, and nobody else knows of the ranks."""
    tools.need(runtime)
    request = make_request(
        tools.make_reference(runtime),
        scratch,
        kind=ImageKind.REFERENCE,
        writable=True,
        stamp="",
    )
    commands = RUNTIMES[runtime]().plan(request)
    env = {**os.environ, "PATH": tools.path}

    def fill_in(argv: Argv, run: str) -> list[str]:
        user = f"{os.getuid()}:{os.getgid()}"
        known = {"%{folder}": str(tmp_path / run), "%{node}": "n0", "%{user}": user}
        return [replace_all(word, known) for word in argv]

    marks = {run: f"from {run}" for run in ("one", "other")}
    clients = {
        run: subprocess.Popen([*fill_in(commands.start, run), "/bin/sh", "-c", DEAF, mark], env=env)
        for run, mark in marks.items()
    }
    try:
        for run, mark in marks.items():
            wait_for(lambda mark=mark: find_sleepers(mark), 20)  # type: ignore[misc]
            clients[run].send_signal(signal.SIGKILL)
            clients[run].wait()
        assert all(map(find_sleepers, marks.values()))
        for argv in commands.prepare:
            subprocess.run(fill_in(argv, "one"), env=env, check=True, timeout=60)
        wait_for(lambda: not find_sleepers(marks["one"]), 10)  # killed; the kernel takes its time
        assert find_sleepers(marks["other"]), "another run's are not touched"
    finally:
        for run in marks:
            [clean] = commands.clean
            subprocess.run(fill_in(clean, run), env=env, check=False, timeout=60)


def replace_all(text: str, known: dict[str, str]) -> str:
    for old, new in known.items():
        text = text.replace(old, new)
    return text


def find_sleepers(mark: str) -> list[int]:
    """Programs of a container, not their client, which has the words too."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"python3" and mark.encode() in words:
            found.append(int(entry.name))
    return found

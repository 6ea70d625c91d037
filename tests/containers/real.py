"""The runtimes of this machine, and what this very machine needs for them to start a container.

The product says nothing of that: elsewhere admins configure podman and docker. Here small scripts
that come first on PATH stand in for them.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

REAL = {
    "charliecloud": ("ch-run", "--version"),
    "enroot": ("enroot", "version"),
    "podman": ("podman", "--version"),
    "apptainer": ("apptainer", "version"),
    "docker": ("docker", "info"),
}
"""A command that fails where the runtime is not installed, or does not answer."""


class Tools:
    """The runtimes that work here, and how tests reach them."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        self._folder, self._root = folder, image.parent / "root"
        self._reasons: dict[str, str] = {}
        self._references: dict[str, str] = {}

    def need(self, runtime: str) -> None:
        """Skip the test where the runtime cannot be tried."""
        if runtime not in self._reasons:
            self._reasons[runtime] = self._find_reason(runtime)
        if self._reasons[runtime]:
            pytest.skip(self._reasons[runtime])

    def make_reference(self, runtime: str) -> str:
        """The small image in the runtime's own store: its entrypoint and user are not to be run."""
        if runtime not in self._references:
            name = f"vjob-test-{uuid.uuid4().hex[:8]}:1"
            changes = ('ENV FROM_IMAGE="made of dough"', 'ENTRYPOINT ["/bin/false"]', "USER 77:77")
            words = [word for change in changes for word in ("--change", change)]
            archive = self._folder / "root.tar"
            subprocess.run(["tar", "-C", self._root, "-cf", archive, "."], check=True)
            subprocess.run(
                [self._folder / runtime, "import", *words, archive, name],
                check=True,
                capture_output=True,
            )
            self._references[runtime] = name
        scheme = {"docker": "dockerd"}.get(runtime, runtime)
        return f"{scheme}://{self._references[runtime]}"

    def close(self) -> None:
        for runtime, name in self._references.items():
            command = [self._folder / runtime, "rmi", "--force", name]
            subprocess.run(command, capture_output=True, check=False)

    def _find_reason(self, runtime: str) -> str:
        command = REAL[runtime]
        if shutil.which(command[0]) is None:
            return f"{runtime} is not installed"
        said = _say(command, USER="nobody")
        if said is not None:
            return f"{runtime} does not work here: {said}"
        if runtime not in ("podman", "docker"):
            return ""
        attempts = _adapt_podman(self._folder) if runtime == "podman" else _adapt_docker()
        for lines in attempts:
            script = self._folder / runtime
            script.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
            script.chmod(0o755)
            said = self._start_one(runtime)
            if said is None:
                return ""
        return f"{runtime} starts no container here: {said}"

    def _start_one(self, runtime: str) -> str | None:
        """What it said where it starts none."""
        words: tuple[str, ...]
        if runtime == "podman":
            # The words that matter are those of containers/podman.py.
            words = (f"--root={self._folder}/store", "--storage-driver=vfs", "run", "--rm")
            words += ("--network=host", "--pid=host", "--rootfs", str(self._root))
        else:
            image = self.make_reference(runtime).partition("://")[2]
            words = ("run", "--rm", "--network=host", "--ulimit=memlock=-1", "--entrypoint=", image)
        return _say((str(self._folder / runtime), *words, "/bin/sh", "-c", ":"))


def _adapt_podman(folder: Path) -> Iterator[list[str]]:
    """As it is; else with limits that root without CAP_SYS_RESOURCE may set; else also with runc,
    for crun refuses hybrid cgroups."""
    program = shlex.quote(shutil.which("podman") or "")
    yield [f'exec {program} "$@"']
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # podman lowers its own limit of processes to this before it starts one (4.3.1).
    processes = min(resource.getrlimit(resource.RLIMIT_NPROC)[1], 32768)
    limits = f'["nofile={files}:{files}", "nproc={processes}:{processes}"]'
    conf = folder / "containers.conf"
    for engine in ("", '[engine]\nruntime = "runc"\n'):
        conf.write_text(f"[containers]\ndefault_ulimits = {limits}\n{engine}")
        yield [f"export CONTAINERS_CONF={shlex.quote(str(conf))}", f'exec {program} "$@"']


def _adapt_docker() -> Iterator[list[str]]:
    """Where its daemon is, for a run's environment does not say; and a daemon that may not raise
    limits is not asked to."""
    program = shlex.quote(shutil.which("docker") or "")
    given = {name: value for name, value in os.environ.items() if name.startswith("DOCKER_")}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
    yield [*exports, f'exec {program} "$@"']
    leave_out = 'for word in "$@"; do [[ $word = --ulimit=* ]] || kept+=("$word"); done'
    yield [*exports, "kept=()", leave_out, f'exec {program} "${{kept[@]}}"']


def _say(command: tuple[str, ...], **env: str) -> str | None:
    """The end of what a command says that fails; None where it does not."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**env, **os.environ},
        )
    except subprocess.TimeoutExpired:
        return "no answer within 60 s"
    return None if done.returncode == 0 else done.stderr.strip()[-300:]

"""Lay out the store of unpacked images on a node: names, paths, and commands that fill it.

Everything is in one 0700 folder of the user's own on a node-local disk, never in /run (a small
tmpfs, absent in batch jobs) nor in the home folder (quota, a file system that nodes share).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from vjob.containers.runtime import Argv, Mount, Request


class Store:
    """The paths of one request on a node."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.base = locate_base(request.scratch, request.user_id)
        self.roots = f"{self.base}/roots"

    @property
    def name(self) -> str:
        """Folder name of an unpacked image, different for a newer image and for a private one."""
        request = self._request
        if request.reuse is False:
            # By node too: a local run has several on one machine, and each cleans up its own.
            return f"vjob-{self._digest(request.stamp)}-{request.run}-%{{node}}"
        return f"vjob-{self._digest('any' if request.reuse is True else request.stamp)}"

    @property
    def root(self) -> str:
        return f"{self.roots}/{self.name}"

    @property
    def lease(self) -> str:
        return f"{self.roots}/.{self.name}.use"

    @property
    def conf(self) -> str:
        """Generated file for this run."""
        return f"{self.base}/conf/{self._request.run}.%{{node}}"

    def build_prepare(self, tool: str, *more: Mount) -> Argv:
        """Return a command that unpacks under a lock with enroot, unsquashfs or (references)
        apptainer; `more` mounts need mount points too."""
        request = self._request
        reuse = {True: "true", False: "false", "auto": "auto"}[request.reuse]
        mounts = (*request.mounts, *more)
        targets = [path for mount in mounts for path in (mount.source, mount.target)]
        words = (tool, request.kind.value, request.image, self.base, self.name, reuse)
        return ("bash", "-c", read_shell("prepare.sh"), "prepare", *words, *targets)

    def build_clean(self) -> tuple[Argv, ...]:
        if self._request.reuse is not False:
            return ()
        words = (self.base, self.name)
        return (("bash", "-c", read_shell("remove.sh"), "remove", *words),)

    def _digest(self, stamp: str) -> str:
        return hashlib.sha256(f"{self._request.image}\0{stamp}".encode()).hexdigest()[:12]


def locate_base(scratch: str, user_id: int) -> str:
    """Return the folder of a user's store in a scratch folder."""
    return f"{scratch}/vjob-{user_id}"


def read_shell(name: str) -> str:
    """Return the text of one of our shell files for `bash -c`, since nodes have no copy."""
    return Path(__file__).with_name("shell").joinpath(name).read_text()

"""The interface of a container runtime, which returns commands as data.

A runtime turns a request into commands; the plan carries them and the node agent runs them. So a
node needs no part of this package, and a dry run shows every command that will run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from varuna_core.records.plan import ContainerPlan

Argv = tuple[str, ...]

STAY: Argv = ("/bin/sh", "-c", "echo vjob-holds; while read -r line; do :; done")
"""Command run inside by `hold`, which reports that it runs and ends with its input."""


class Unsuitable(Exception):
    """Raised for a request that a runtime cannot carry out; says why, and what to do instead."""


class ImageKind(Enum):
    """The kind of a conf's image."""

    SQUASHFS = "squashfs"
    FOLDER = "folder"
    ARCHIVE = "archive"
    SIF = "sif"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A path of the node that is visible inside."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """The container section of a conf, in the form that a runtime needs."""

    run: str
    """Id of the run."""
    image: str
    """An absolute path, or a reference."""
    kind: ImageKind
    mounts: tuple[Mount, ...]
    workdir: str
    writable: bool
    remap_root: bool
    """True to show the user as root inside."""
    reuse: bool | Literal["auto"]
    gpus: bool
    """True if ranks use GPUs."""
    user_id: int
    scratch: str
    """Node-local folder for unpacked images."""
    stamp: str
    """Size and time of the image, which change with it; empty if not known."""


AMD_DEVICES: Argv = ("--device=/dev/kfd", "--device=/dev/dri")
"""Device files of AMD's driver; its libraries are the image's own."""
INTEL_DEVICES: Argv = ("--device=/dev/dri",)


class Runtime(ABC):
    name: str
    probe: Argv
    """A command that succeeds if the runtime is installed."""
    kinds: frozenset[ImageKind]
    """The kinds of image that the runtime takes."""
    is_automatic: bool = True
    """True if `runtime: auto` may choose the runtime on a node."""

    @abstractmethod
    def plan(self, request: Request) -> ContainerPlan:
        """Return every command that a node runs for a request; raise Unsuitable if impossible."""

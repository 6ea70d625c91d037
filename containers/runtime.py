"""The interface of a container runtime: commands as data.

A runtime turns a request into commands; the plan carries them and the node agent runs them. So a
node needs none of this package, and a dry run shows every command that will run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from varuna_core.records.plan import ContainerPlan

Argv = tuple[str, ...]

STAY: Argv = ("/bin/sh", "-c", "echo vjob-holds; while read -r line; do :; done")
"""Run inside by `hold`: says that it is there, and ends with its input."""


class Unsuitable(Exception):
    """A request that a runtime cannot carry out: says what in it, and what to do instead."""


class ImageKind(Enum):
    """Kind of a conf's image."""

    SQUASHFS = "squashfs"
    FOLDER = "folder"
    ARCHIVE = "archive"
    SIF = "sif"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A path of the node that shows inside."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """The container section of a conf, as a runtime needs it."""

    run: str
    """Run id."""
    image: str
    """Absolute path, or a reference."""
    kind: ImageKind
    mounts: tuple[Mount, ...]
    workdir: str
    writable: bool
    remap_root: bool
    """Whether the user is shown as root inside."""
    reuse: bool | Literal["auto"]
    gpus: bool
    """Whether ranks use GPUs."""
    user_id: int
    scratch: str
    """Node-local folder for what is unpacked."""
    stamp: str
    """What changes when the image changes: its size and time, empty where not known."""


AMD_DEVICES: Argv = ("--device=/dev/kfd", "--device=/dev/dri")
"""Device files of AMD's driver; its libraries are the image's own."""
INTEL_DEVICES: Argv = ("--device=/dev/dri",)


class Runtime(ABC):
    """One container runtime."""

    name: str
    probe: Argv
    """A command that succeeds where the runtime is installed."""
    kinds: frozenset[ImageKind]
    """Images that it takes."""
    is_automatic: bool = True
    """Whether `runtime: auto` may choose it on a node."""

    @abstractmethod
    def plan(self, request: Request) -> ContainerPlan:
        """Every command that a node runs for this request; Unsuitable where there are none."""

"""The interface of a container runtime: commands as data.

A runtime turns a request into commands; the plan carries them and the node agent runs them. So a
node needs none of this package, and a dry run shows every command that will run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

Argv = tuple[str, ...]

ENTER = "VJOB_ENTER"
"""The one variable that a runtime passes in: the agent's code that sets all others."""

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


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands that the agent runs on a node; the plan's ContainerPlan has the same fields.

    The agent fills in `%{rank}`, `%{node}`, `%{attempt}`, `%{folder}` (the run's), `%{user}`
    (uid:gid) and `%{holder}` (the pid of what `hold` started) in words.
    """

    runtime: str
    image: str
    workdir: str
    probe: Argv
    """Succeeds where the runtime works."""
    prepare: tuple[Argv, ...]
    """Run in order, once a node, before the ranks start."""
    start: Argv
    """What stands before each rank's command; empty where the agent itself runs inside."""
    hold: Argv = ()
    """Starts the node's one container, which `start` enters; empty where each rank has its own."""
    hold_again: str = ""
    """Regular expression of what `hold` says where it is worth another try."""
    enter_as: str = ENTER
    """Name under which the runtime's process gets the variable that enters."""
    reads_image: bool = False
    """Whether the image's own variables lie in files of its root, for the agent's code to read."""
    wraps: bool = False
    """Whether the runtime's process stays in between, and the rank is another one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the runtime itself, for every command here."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Variables that enter unless the conf sets them."""
    lease: str | None = None
    """A file that the agent holds a shared lock on while ranks run."""
    clean: tuple[Argv, ...] = ()
    """Run after the ranks ended."""
    step: Argv = ()
    """Options for srun where it starts the container: then the agent runs inside."""


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
    def plan(self, request: Request) -> Commands:
        """Every command that a node runs for this request; Unsuitable where there are none."""

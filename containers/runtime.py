"""What a container runtime is to us: commands as data.

A runtime turns a request into commands; the plan carries them and the node agent runs them. So a
node needs none of this package, and a dry run shows every command that will run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Argv = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The container section of a conf, as a runtime needs it."""

    image: str
    """Absolute path of an image file, or a reference."""
    mounts: tuple[str, ...]
    """`source:target` pairs with absolute paths."""
    workdir: str
    writable: bool
    reuse: bool | Literal["auto"]
    gpus: bool
    """Whether ranks use GPUs."""
    user_id: int
    scratch: str
    """Node-local folder for what is unpacked."""
    stamp: str
    """What changes when the image changes: its size and time, empty for a reference."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """What the agent does on a node; the plan's ContainerPlan has the same fields."""

    runtime: str
    image: str
    prepare: tuple[Argv, ...]
    """Run in order, once a node, before the ranks start."""
    before_env: Argv
    """The start of each rank's command."""
    env_flag: Argv
    """Repeated for each variable that enters, with {name} filled in: values stay off the argv."""
    after_env: Argv
    """Between the environment flags and the program's own command."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the runtime itself."""
    clean: tuple[Argv, ...] = ()
    """Run after the ranks ended."""


class Runtime(ABC):
    """One container runtime."""

    name: str
    probe: Argv
    """A command that succeeds where the runtime is installed."""

    @abstractmethod
    def plan(self, request: Request) -> Commands:
        """Every command that a node runs for this request."""

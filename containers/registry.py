"""Table of the container runtimes by their name in a conf."""

from __future__ import annotations

from collections.abc import Mapping

from vjob.containers.apptainer import Apptainer
from vjob.containers.charliecloud import Charliecloud
from vjob.containers.docker import Docker
from vjob.containers.enroot import Enroot
from vjob.containers.podman import Podman
from vjob.containers.pyxis import Pyxis
from vjob.containers.runtime import Runtime

RUNTIMES: Mapping[str, type[Runtime]] = {
    kind.name: kind for kind in (Enroot, Charliecloud, Apptainer, Podman, Pyxis, Docker)
}
"""Runtimes by name, in the order in which `auto` tries them. `none` means no runtime and has no
class."""

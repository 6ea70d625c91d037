"""The container runtimes, by the conf's name."""

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
"""By the conf's own name, in the order in which `auto` tries them. `none` is the absence of a
runtime and has no class."""

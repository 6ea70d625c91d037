"""Which runtimes there are."""

from __future__ import annotations

from collections.abc import Mapping

from containers.apptainer import Apptainer
from containers.charliecloud import Charliecloud
from containers.docker import Docker
from containers.enroot import Enroot
from containers.podman import Podman
from containers.pyxis import Pyxis
from containers.runtime import Runtime

RUNTIMES: Mapping[str, type[Runtime]] = {
    kind.name: kind for kind in (Enroot, Charliecloud, Apptainer, Podman, Pyxis, Docker)
}
"""By the conf's own name, in the order in which `auto` tries them. `none` is the absence of a
runtime and has no class."""

"""Which runtimes there are."""

from __future__ import annotations

from collections.abc import Mapping

from containers.enroot import Enroot
from containers.runtime import Runtime

RUNTIMES: Mapping[str, type[Runtime]] = {Enroot.name: Enroot}
"""By the conf's own name. `none` is the absence of a runtime and has no class."""

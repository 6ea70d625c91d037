"""List the container runtimes by their names in a conf: vjob's own, then plug-ins."""

from __future__ import annotations

from collections.abc import Mapping

from varuna_core.plugins import list_plugins, load_plugin
from vjob.containers.registry import RUNTIMES
from vjob.containers.runtime import Runtime

GROUP = "vjob.container_runtimes"


def list_runtimes() -> Mapping[str, type[Runtime]]:
    """Return every runtime class by name, in the order in which `auto` tries them on a node.

    `containers` imports only the plan's record, so its own table cannot include plug-ins.
    """
    found = dict(RUNTIMES)
    for name in list_plugins(GROUP):
        kind = None if name in found else load_plugin(GROUP, name)
        if kind is not None:
            found[name] = kind
    return found

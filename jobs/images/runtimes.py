"""The container runtimes by their names in a conf: vjob's own, then plug-ins."""

from __future__ import annotations

from collections.abc import Mapping

from varuna_core.plugins import list_plugins, load_plugin
from vjob.containers.registry import RUNTIMES
from vjob.containers.runtime import Runtime

GROUP = "vjob.container_runtimes"


def list_runtimes() -> Mapping[str, type[Runtime]]:
    """Every class by name, those of `auto` in the order in which a node tries them.

    `containers` imports the plan's record alone, so its table cannot ask for plug-ins itself.
    """
    found = dict(RUNTIMES)
    for name in list_plugins(GROUP):
        kind = None if name in found else load_plugin(GROUP, name)
        if kind is not None:
            found[name] = kind
    return found

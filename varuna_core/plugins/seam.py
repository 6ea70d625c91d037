"""Combine the built-in parts of one kind with the plug-ins that others add to them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from varuna_core.plugins.installed import (
    GROUPS,
    Plugin,
    find_plugin,
    list_plugins,
    recall_help,
    remember_help,
    warn_once,
)

API = 1
"""The version of the plug-in interface; objects with another version are left out."""


@dataclass(frozen=True)
class BuiltIn:
    """A row of a static table: a part that comes with vjob."""

    name: str
    help: str
    """Help text of one line, which is shown without importing the part."""
    target: str
    """Place of the part's object, as `module:attribute`."""


class Seam:
    """Parts of one kind by name, built-in ones first. Nothing is imported before `load`."""

    def __init__(self, group: str, rows: Sequence[BuiltIn]) -> None:
        assert group in GROUPS, group
        self.group = group
        self.rows: Mapping[str, BuiltIn] = {row.name: row for row in rows}

    def list_plugins(self) -> List[str]:
        """Return the names of plug-ins, except those with the name of a built-in part."""
        return [name for name in list_plugins(self.group) if not self._is_taken(name)]

    def list_names(self) -> List[str]:
        """Return built-in names in the order of the table, then plug-ins."""
        return [*self.rows, *self.list_plugins()]

    def get_help(self, name: str) -> str:
        """Return a part's help line; for a plug-in that was never used, its distribution."""
        if name in self.rows:
            return self.rows[name].help
        plugin = find_plugin(self.group, name)
        known = recall_help(self.group, name)
        return known or ("" if plugin is None else f"A plug-in of {plugin.distribution}.")

    def load(self, name: str) -> Any:
        """Return the part; None if the name is unknown or its plug-in is left out."""
        if name in self.rows:
            return resolve(self.rows[name].target)
        return load_plugin(self.group, name)

    def remember_help(self, name: str, text: str) -> None:
        if name not in self.rows:
            remember_help(self.group, name, text)

    def _is_taken(self, name: str) -> bool:
        if name in self.rows:
            plugin = find_plugin(self.group, name)
            who = "" if plugin is None else plugin.distribution
            warn_once(f"plug-in {name} of {who} is ignored: vjob itself has {name}")
        return name in self.rows


def load_plugin(group: str, name: str) -> Any:
    """Return a plug-in's object; None if there is none, or if it is left out with a warning."""
    plugin = find_plugin(group, name)
    return None if plugin is None else _load(plugin)


@functools.lru_cache(maxsize=None)
def _load(plugin: Plugin) -> Any:
    who = f"plug-in {plugin.name} of {plugin.distribution} is ignored"
    try:
        found = resolve(plugin.target)
    except (Exception, SystemExit) as error:  # whatever another's code raises as it is imported
        text = (str(error).strip().splitlines() or [""])[0]
        warn_once(f"{who}: {plugin.target} cannot be imported: {type(error).__name__}: {text}")
        return None
    api = getattr(found, "API", None)
    if api != API:
        what = "has no API number" if api is None else f"is for API {api}"
        warn_once(f"{who}: {plugin.target} {what}; this vjob has API {API}")
        return None
    return found


def resolve(target: str) -> Any:
    """Return the object that `module:attribute` names, or the module without an attribute."""
    module, _, path = target.partition("[")[0].strip().partition(":")
    found = importlib.import_module(module.strip())
    return functools.reduce(getattr, filter(None, path.strip().split(".")), found)


def collect_for_nodes(names: Mapping[str, Sequence[str]]) -> Dict[str, bytes]:
    """Return sources for a bundle by name in the archive; `names` has plug-ins by group.

    A plug-in for nodes is one file that imports only what the node's Python has. It is copied under
    `varuna_core/plugins`; `carried.py` lists it there.
    """
    sources: Dict[str, bytes] = {}
    rows: List[Tuple[str, str, str, str]] = []
    for group in sorted(names):
        for name in sorted(names[group]):
            plugin = find_plugin(group, name)
            source = None if plugin is None else _read_source(plugin)
            if plugin is None or source is None:
                continue
            module = f"carried_{len(rows)}"
            _, colon, path = plugin.target.partition(":")
            target = f"varuna_core.plugins.{module}{colon}{path}"
            rows.append((group, name, target, plugin.distribution))
            sources[f"varuna_core/plugins/{module}.py"] = source
    text = f'"""Plug-ins of this bundle."""\n\nPLUGINS = {tuple(rows)!r}\n'
    return {**sources, "varuna_core/plugins/carried.py": text.encode()}


def _read_source(plugin: Plugin) -> Optional[bytes]:
    module = plugin.target.partition(":")[0].strip()
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
            raise ImportError("the module is not a single source file")
        with open(spec.origin, "rb") as handle:
            return handle.read()
    except Exception as error:
        who = f"plug-in {plugin.name} of {plugin.distribution}"
        warn_once(f"{who} is not carried to the nodes: {module}: {error}")
        return None

"""Find installed plug-ins from the metadata of distributions, without importing any.

Reading all metadata takes longer than `vjob --help`, so the result is cached in
~/.cache/vjob/plugins, in a file for each state of sys.path: its entries with their times. pip
changes the time of a folder when it installs into it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

from varuna_core.plugins import carried
from varuna_core.records.files import PRIVATE_FOLDER, locate_cache, read_json, write_json

log = logging.getLogger("vjob.plugins")
GROUPS = (
    "vjob.schedulers",
    "vjob.container_runtimes",
    "vjob.accelerators",
    "vjob.trackers",
    "vjob.findings",
    "vjob.known_lines",
    "vjob.importers",
    "vjob.exporters",
    "vjob.commands",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FORMAT = 1
_MOST_KEPT = 20
_SETTLED_S = 2.0
"""A folder that changed less than this ago may still be written by pip and is not cached yet."""


class Plugin(NamedTuple):
    """An entry point."""

    group: str
    name: str
    target: str
    """`module:attribute`, or a module."""
    distribution: str
    """Name and version of the distribution."""


class _CacheContent(NamedTuple):
    plugins: Tuple[Plugin, ...]
    files: Dict[str, int]
    """Files of entry points that were read, with their times."""
    helps: Dict[str, str]
    """The one-line help of plug-ins that have been used, by group and name."""


_by_state: Dict[str, _CacheContent] = {}
_warned: Set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning once, however often it occurs."""
    if text not in _warned:
        _warned.add(text)
        log.warning(text)


def list_plugins(group: str) -> List[str]:
    """Return the names of a group's plug-ins, sorted."""
    return sorted(_list_group(group))


def find_plugin(group: str, name: str) -> Optional[Plugin]:
    return _list_group(group).get(name)


def _list_group(group: str) -> Dict[str, Plugin]:
    """Return a group's plug-ins by name; of two with the same name, the first on sys.path."""
    found: Dict[str, Plugin] = {}
    for plugin in list_installed():
        if plugin.group != group:
            continue
        first = found.setdefault(plugin.name, plugin)
        who = f"plug-in {plugin.name} of {plugin.distribution}"
        if not _NAME.fullmatch(plugin.name):
            warn_once(f"plug-in {plugin.name!r} of {plugin.distribution} is ignored: invalid name")
            del found[plugin.name]
        elif first is not plugin:
            warn_once(f"{who} is ignored: {first.distribution} has a plug-in of that name")
    return found


def list_installed() -> Tuple[Plugin, ...]:
    """Return the entry points of all groups, in the order of sys.path."""
    if carried.PLUGINS is not None:
        return tuple(Plugin(*row) for row in carried.PLUGINS)
    return _read_kept()[1].plugins


def recall_help(group: str, name: str) -> str:
    """Return a plug-in's help line; empty until the plug-in has been used."""
    return _read_kept()[1].helps.get(f"{group} {name}", "")


def remember_help(group: str, name: str, text: str) -> None:
    """Store a plug-in's help line, so that lists can show it without importing the plug-in."""
    key, kept = _read_kept()
    if kept.helps.get(f"{group} {name}") != text:
        kept.helps[f"{group} {name}"] = text
        _write_kept(key, kept)


def _read_kept() -> Tuple[str, _CacheContent]:
    """Return the cache key for the state of sys.path, and what is installed there."""
    import hashlib  # and OpenSSL, which a node without plug-ins of its own does not need

    times = [(entry or os.getcwd(), _read_time(entry or ".")) for entry in sys.path]
    key = hashlib.sha256(json.dumps([_FORMAT, times]).encode()).hexdigest()
    kept = _by_state.get(key) or _read_file(_name_file(key))
    if kept is None or any(_read_time(path) != seen for path, seen in kept.files.items()):
        kept = _read_metadata()
        newest = max([seen for _, seen in times] + [*kept.files.values()])
        if newest < (time.time() - _SETTLED_S) * 1e9:
            _write_kept(key, kept)
    _by_state[key] = kept
    return key, kept


def _read_time(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _name_file(key: str) -> Path:
    return locate_cache("plugins") / f"{key}.json"


def _read_file(path: Path) -> Optional[_CacheContent]:
    value = read_json(path)
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        plugins = tuple(Plugin(*map(str, row)) for row in value["plugins"])
        return _CacheContent(plugins, dict(value["files"]), dict(value["helps"]))
    return None


def _write_kept(key: str, kept: _CacheContent) -> None:
    path = _name_file(key)
    with contextlib.suppress(OSError):  # a home that is full, or of somebody else
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
        write_json(path, kept._asdict(), lasts=False)
        by_age = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in by_age[:-_MOST_KEPT]:
            old.unlink()


def _read_metadata() -> _CacheContent:
    from importlib.metadata import distributions  # takes long to import

    plugins: Dict[Plugin, None] = {}
    names: Set[str] = set()
    files: Dict[str, int] = {}
    for distribution in distributions():
        if "vjob." not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = str(distribution.metadata["Name"])
        who = f"{name} {distribution.version}"
        mine = [
            Plugin(entry.group, entry.name, entry.value, who)
            for entry in distribution.entry_points
            if entry.group in GROUPS
        ]
        if name not in names:  # a second one on sys.path is hidden by the first
            plugins.update(dict.fromkeys(mine))
        if mine:
            names.add(name)
            folder = getattr(distribution, "_path", None)  # of every finder in the library
            path = f"{folder}/entry_points.txt"
            if folder is not None and _read_time(path):
                files[path] = _read_time(path)
    return _CacheContent(tuple(plugins), files, {})

"""Resolve a conf given in Python (a path, a dict, a typed conf) with overrides."""

from __future__ import annotations

import os
import re
from collections.abc import ItemsView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from vjob.jobs.conf.fates import list_changed
from vjob.jobs.conf.loading.load import build_tree, read_text
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.write import dump_yaml, render_resolved
from vjob.jobs.conf.yaml_tree import Scalar, Table, join_key
from vjob.jobs.errors import InputError

if TYPE_CHECKING:
    from vjob.jobs.planning.resolve_auto import Resolved

ConfLike = Union[str, "os.PathLike[str]", Mapping[str, Any], JobConf]
"""A conf's path, its content as a dict, or what `vjob.load` returned."""
FROM_PYTHON = Path("<conf from Python>")
"""Name, in messages, of a conf that Python passes as a dict or an object; relative paths in the
conf start at the current folder."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ConfText:
    """A conf to be read; `text` is None if `path` is a file."""

    path: Path
    text: str | None = None
    overrides: tuple[str, ...] = ()
    """Overrides as for `--set`."""


def read_source(
    conf: ConfLike,
    *,
    set: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
) -> ConfText:
    """Return the text of a conf and the overrides of its keys, without reading a file."""
    overrides = [
        spell_override(str(key), value) for key, value in _items(set, "set", "train.steps")
    ]
    for variable, value in _items(env, "env", "NAME"):
        if not _NAME.fullmatch(str(variable)):
            raise InputError(f"env: {variable!r} cannot be the name of a variable")
        overrides.append(spell_override(f"env.{variable}", str(value)))
    if name is not None:
        overrides.append(spell_override("name", name))
    if isinstance(conf, JobConf):
        path, text = FROM_PYTHON, render_resolved(conf, written=list_changed(conf))
    elif isinstance(conf, Mapping):
        path, text = FROM_PYTHON, dump_yaml(simplify(conf))
    elif isinstance(conf, (str, os.PathLike)):
        path, text = Path(os.fspath(conf)).expanduser(), None
    else:
        raise InputError(
            f"{conf!r} is not a conf: give the path of a conf.yaml, a dict, or what vjob.load "
            "returned"
        )
    return ConfText(path=path, text=text, overrides=tuple(overrides))


def resolve(source: ConfText, *, require_env: bool = True) -> Resolved:
    """Read a conf, plan what is `auto`, and check it; raise ConfError with all problems."""
    from vjob.jobs.planning.resolve_auto import resolve_conf

    return resolve_conf(source.path, source.overrides, text=source.text, require_env=require_env)


def find_written(source: ConfText, *keys: str) -> str | None:
    """Return a key's value as the conf spells it, such as (`program`, `python`); None if
    the conf does not have the key, so that a default applies."""
    text = read_text(source.path, str(source.path)) if source.text is None else source.text
    base = Path(os.path.abspath(source.path)).parent
    tree, _ = build_tree(
        text, str(source.path), base, source.overrides, os.environ, is_file=source.text is None
    )
    for key in keys:
        entry = tree.entries.get(key) if isinstance(tree, Table) else None
        if entry is None:
            return None
        tree = entry.node
    return tree.text if isinstance(tree, Scalar) and not tree.is_null else None


def spell_override(key: str, value: Any) -> str:
    """Return `KEY=VALUE` for a Python value, as `--set` takes it."""
    text = dump_yaml(simplify(value, key), one_line=True)
    return f"{key}={text.removesuffix('...' + chr(10)).strip()}"


def simplify(value: Any, key: str = "") -> Any:
    """Convert a value to YAML's own types: a path to its text, a numpy number to Python's."""
    if isinstance(value, Mapping):
        return {
            str(name): simplify(inner, join_key(key, str(name))) for name, inner in value.items()
        }
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value if type(value) in (str, int, float, bool, type(None)) else _plain(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [simplify(inner, f"{key}[{number}]") for number, inner in enumerate(value)]
    if hasattr(value, "item"):
        return simplify(value.item(), key)
    raise InputError(
        f"{key} = {value!r}: a value of type {type(value).__name__} cannot stand in a conf; give "
        "numbers, text, lists and dicts"
    )


def _items(given: Any, name: str, example: str) -> ItemsView[str, Any]:
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise InputError(f"{name} must be a dict, such as {{{example!r}: 100}}, and is {given!r}")
    return given.items()


def _plain(value: Any) -> Any:
    """Convert an enum or a subclass of a plain type, such as numpy's float64, to the plain type."""
    value = getattr(value, "value", value)
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))

"""A conf as Python has it (a path, a dict, a typed conf), with what is set over it, resolved."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.write import dump_yaml, render_resolved
from vjob.jobs.errors import InputError

if TYPE_CHECKING:
    from vjob.jobs.planning.resolve_auto import Resolved

ConfLike = Union[str, "os.PathLike[str]", Mapping[str, Any], JobConf]
"""A conf's path, its content as a dict, or what `vjob.load` returned."""
FROM_PYTHON = Path("<conf from Python>")
"""Called so in messages; relative paths in it start at the current folder."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ConfText:
    """A conf to be read: its text is None where the path is a file."""

    path: Path
    text: str | None = None
    overrides: tuple[str, ...] = ()
    """As for `--set`."""


def read_source(
    conf: ConfLike,
    *,
    set: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
) -> ConfText:
    """The text of a conf, and what is set over its keys; reads no file."""
    overrides = [spell_override(key, value) for key, value in (set or {}).items()]
    for variable, value in (env or {}).items():
        if not _NAME.fullmatch(variable):
            raise InputError(f"env: {variable!r} cannot be the name of a variable")
        overrides.append(spell_override(f"env.{variable}", str(value)))
    if name is not None:
        overrides.append(spell_override("name", name))
    if isinstance(conf, JobConf):
        path, text = FROM_PYTHON, render_resolved(conf)
    elif isinstance(conf, Mapping):
        path, text = FROM_PYTHON, dump_yaml(simplify(conf))
    else:
        path, text = Path(os.fspath(conf)).expanduser(), None
    return ConfText(path=path, text=text, overrides=tuple(overrides))


def resolve(source: ConfText, *, require_env: bool = True) -> Resolved:
    """Read, plan what is `auto`, check; ConfError with every problem found."""
    from vjob.jobs.planning.resolve_auto import resolve_conf

    return resolve_conf(source.path, source.overrides, text=source.text, require_env=require_env)


def spell_override(key: str, value: Any) -> str:
    """`KEY=VALUE` as `--set` takes it, of a value of Python."""
    text = dump_yaml(simplify(value), one_line=True)
    return f"{key}={text.removesuffix('...' + chr(10)).strip()}"


def simplify(value: Any) -> Any:
    """The value in YAML's own types: a path is its text, a number of numpy is Python's."""
    if isinstance(value, Mapping):
        return {str(key): simplify(inner) for key, inner in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value if type(value) in (str, int, float, bool, type(None)) else _plain(value)
    if isinstance(value, Sequence):
        return [simplify(inner) for inner in value]
    if hasattr(value, "item"):
        return simplify(value.item())
    raise InputError(f"{value!r} cannot stand in a conf: give numbers, text, lists and dicts")


def _plain(value: Any) -> Any:
    """An enum or a subclass of a plain type, such as numpy's float64, as that type."""
    value = getattr(value, "value", value)
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))

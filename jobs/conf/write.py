"""Write a JobConf back as conf.yaml: the resolved conf beside a run, in the conf's own spelling.

`parse_conf(render_resolved(conf))` equals `conf`; with `redact`, secrets are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from varuna_core.facts.partition import Partition
from vjob.jobs.conf.fates import drop_unwritten
from vjob.jobs.conf.redact import redact_value
from vjob.jobs.conf.references import is_kept_literal
from vjob.jobs.conf.schema import FUNCTION, JobConf, Program
from vjob.jobs.conf.yaml_tree import join_key


class _Dumper(yaml.SafeDumper):
    """Quotes any text with control characters: PyYAML 6.0.3 writes U+0085 as a line break."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(value: Any, *, one_line: bool = False) -> str:
    """Dump a value as a block with innermost lists and mappings on one line, or all on one line."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True if one_line else None,
        width=100_000 if one_line else 100,
    )
    return text


def resolve_conf(conf: JobConf) -> dict[str, Any]:
    """Return every key with its value, as plain mappings, lists and scalars."""
    resolved = _to_plain(conf)
    assert isinstance(resolved, dict)
    return resolved


def render_resolved(
    conf: JobConf, *, redact: bool = False, written: Collection[str] | None = None
) -> str:
    """Render the resolved conf as YAML, with all keys.

    With `written`, a script's conf lacks the keys that count only if they are written.
    """
    plain = resolve_conf(conf)
    if written is not None:
        plain = drop_unwritten(conf, plain, written)
    if redact:
        plain = redact_value(plain)
    return dump_yaml(_escape(plain))


def _escape(value: Any, key: str = "") -> Any:
    """Escape `${` in texts in which it is no reference."""
    if isinstance(value, Mapping):
        return {name: _escape(inner, join_key(key, str(name))) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escape(inner, f"{key}[{at}]") for at, inner in enumerate(value)]
    if isinstance(value, str) and "${" in value and not is_kept_literal(key):
        return value.replace("${", "$${")
    return value


def _to_plain(value: Any) -> Any:
    if isinstance(value, Program):
        return _spell_program(value)
    if is_dataclass(value):
        return {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _to_plain(inner) for name, inner in value.items()}
    if isinstance(value, Partition):
        return value.spell()
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return value


def _spell_program(program: Program) -> Any:
    named = program.module or list(program.command) if program.path is None else program.path
    if program.path is None and not named:
        return program.kind
    spelled: dict[str, Any] = {program.kind: named}
    if program.config is not None:
        spelled["config"] = program.config
    if program.launch != "auto":
        spelled["launch"] = program.launch
    if program.arguments != "none":
        spelled["arguments"] = program.arguments
    spelled["args"] = list(program.args)
    if program.python is not None:
        spelled["python"] = program.python
    if program.kind != FUNCTION:
        spelled["snapshot"] = program.snapshot
    return spelled

"""Plain data to YAML that reads back as the same text."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Quotes each text with control characters: PyYAML 6.0.3 writes U+0085 as a line break."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(value: Any, *, one_line: bool = False) -> str:
    """The value as a block whose innermost lists and mappings are on one line, or all on one."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True if one_line else None,
        width=100_000 if one_line else 100,
    )
    return text

"""Read the resolved conf in a run folder, which may be another user's."""

from __future__ import annotations

from typing import Any

from varuna_core.records.files import read_text
from varuna_core.records.runfolder import RunFolder

MOST_BYTES = 1 << 20
"""Size limit of a resolved conf in bytes; a larger file is not ours, and slow to read."""


def read_resolved(run: RunFolder) -> dict[str, Any]:
    """Return the conf as submitted, without secrets; empty if it cannot be read."""
    try:
        return parse_resolved(read_text(run.resolved, most=MOST_BYTES))
    except (OSError, UnicodeDecodeError):
        return {}


def parse_resolved(text: str) -> dict[str, Any]:
    """Parse the text of a resolved conf; empty if it is no mapping in YAML."""
    import yaml  # a run of a built-in program needs none of it

    try:
        value = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Whether there is a terminal that a screen can be drawn on; imports nothing of Textual."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

STREAMS = ("stdin", "stdout", "stderr")
"""Keys come from the first; Textual draws on the last."""


def can_show(environ: Mapping[str, str]) -> bool:
    """Whether all of it is a terminal that can move its cursor, and Textual is installed."""
    if environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    streams = [getattr(sys, name) for name in STREAMS]
    are_terminals = all(stream is not None and stream.isatty() for stream in streams)
    return are_terminals and importlib.util.find_spec("textual") is not None

"""The table of known lines; here its least part."""

from __future__ import annotations

import re

_ROOT = re.compile(r"^\w*(?:Error|Exception): |^Segmentation fault|oom_kill|out of memory")


def classify_line(text: str) -> str | None:
    """The kind of a line without its tag; None for one like any other."""
    return "error" if _ROOT.search(text) else None

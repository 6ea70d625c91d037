"""The request that tests change a field or two of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vjob.containers.runtime import ImageKind, Request


def make_request(image: Path | str, scratch: Path, **changes: Any) -> Request:
    """An image file of ours, read-only, for ourselves."""
    fields: dict[str, Any] = {
        "run": "run-1",
        "image": str(image),
        "kind": ImageKind.SQUASHFS,
        "mounts": (),
        "workdir": "/",
        "writable": False,
        "remap_root": False,
        "reuse": "auto",
        "gpus": False,
        "user_id": os.getuid(),
        "scratch": str(scratch),
        "stamp": "1",
    }
    return Request(**{**fields, **changes})

"""Numbers and texts as the page carries them: deflated, in base64, unpacked by the browser.

Columns of whole numbers are written a byte of all rows at a time: the upper bytes are nearly always
zero, so a million events take a third of the room that their own order would.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL = 6


def pack_bytes(data: bytes) -> str:
    """As reports/web/unpack.js takes it apart."""
    return base64.b64encode(zlib.compress(data, LEVEL)).decode("ascii")


def pack_json(value: Any) -> str:
    return pack_bytes(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def list_planes(column: npt.NDArray[Any]) -> bytes:
    """32-bit numbers, the lowest byte of each first, then the next; what does not fit is cut."""
    bounds = np.iinfo(np.int32)
    whole = np.clip(column, bounds.min, bounds.max).astype("<i4")
    planes: bytes = whole.view(np.uint8).reshape(-1, 4).T.tobytes()
    return planes

"""Values that travel as lines through a channel which mixes the lines of many senders.

srun passes a task's output on in pieces of about a kilobyte, so that long lines of several nodes
would end up within each other. A parcel is one JSON value in short lines:

    vjob-parcel <key> <number>/<count> <base64>
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any, Dict, Iterator, Optional, Tuple

PIECE_CHARS = 600
_LINE = re.compile(r"vjob-parcel (\S{1,80}) (\d{1,6})/(\d{1,6}) ([A-Za-z0-9+/=]*)")


def pack(key: str, value: Any) -> Iterator[str]:
    """The lines; the key is a word that no other parcel of the channel has."""
    data = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    pieces = [data[at : at + PIECE_CHARS] for at in range(0, len(data), PIECE_CHARS)]
    for number, piece in enumerate(pieces, start=1):
        yield f"vjob-parcel {key} {number}/{len(pieces)} {piece}"


class Unpacker:
    """Puts parcels together, in whatever order their lines come."""

    def __init__(self) -> None:
        self._open: Dict[str, Dict[int, str]] = {}

    def add(self, line: str) -> Tuple[bool, Optional[Any]]:
        """Whether the line was of a parcel, and what was in it where it was the last one missing.

        A parcel that arrives damaged is dropped: its sender counts as one that said nothing.
        """
        match = _LINE.search(line)
        if match is None:
            return False, None
        key, number, count, piece = match.groups()
        held = self._open.setdefault(key, {})
        held[int(number)] = piece
        if set(held) != set(range(1, int(count) + 1)):
            return True, None
        del self._open[key]
        try:
            data = base64.b64decode("".join(held[at] for at in sorted(held)), validate=True)
            return True, json.loads(zlib.decompress(data))
        except (ValueError, zlib.error):
            return True, None

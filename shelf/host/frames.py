"""What the two sides of `vjob --host` say to each other: a line of JSON, and bytes after it.

    {"vjob": 1, "out": 120, "bytes": 17}\\n  and 17 bytes

Lines that are none of these, such as a greeting of the login shell, are passed over.
"""

from __future__ import annotations

import json
from typing import IO, Any

VERSION = 1
MOST_LINE_BYTES = 64 << 20
MOST_DATA_BYTES = 1 << 30


def write_frame(stream: IO[bytes], data: bytes = b"", **said: Any) -> None:
    head = {"vjob": VERSION, **said, "bytes": len(data)}
    stream.write(json.dumps(head).encode() + b"\n" + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """The next frame; None where the stream ends, be it in the middle of one."""
    while line := stream.readline(MOST_LINE_BYTES):
        head = parse_head(line)
        if head is not None:
            data = stream.read(head["bytes"])
            return (head, data) if len(data) == head["bytes"] else None
    return None


def parse_head(line: bytes) -> dict[str, Any] | None:
    """The JSON of a frame's first line; None for any other line."""
    if not line.startswith(b'{"vjob": ') or not line.endswith(b"\n"):
        return None
    try:
        head = json.loads(line)
    except ValueError:
        return None
    length = head.get("bytes")
    is_length = isinstance(length, int) and 0 <= length <= MOST_DATA_BYTES
    return head if is_length and head["vjob"] == VERSION else None

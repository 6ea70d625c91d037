"""Exchange lines between the two sides of `vjob --host`, before files: `{"vjob": 2, ...}`.

Other lines, such as a greeting of the login shell, are skipped. Files follow as a tar stream.
"""

from __future__ import annotations

import io
import json
import tarfile
from typing import IO, Any

VERSION = 2
MOST_LINE_BYTES = 64 << 20


def write_line(stream: IO[bytes], **said: Any) -> None:
    stream.write(json.dumps({"vjob": VERSION, **said}).encode() + b"\n")
    stream.flush()


def read_line(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the next line from the other side; None at the end of the stream."""
    while line := stream.readline(MOST_LINE_BYTES):
        if line.startswith(b'{"vjob": ') and line.endswith(b"\n"):
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if said["vjob"] == VERSION:
                return dict(said)
    return None


def add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))

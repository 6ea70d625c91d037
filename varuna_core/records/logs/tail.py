"""Read the ends of log files, and what was added to them, cheaply and safely.

Log lines go to a terminal: whatever could move its cursor or set its title is made visible instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

TAIL_BYTES = 64 * 1024
READ_BYTES = 4 * 1024 * 1024
SKIP_BYTES = 16 * 1024 * 1024
"""As far back as `--lines` looks."""
LONGEST = 1024 * 1024
"""Bytes of a line without an end; then it counts as one, and its rest as another."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Escapes and control characters as `\\x1b`; tabs stay."""
    return CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines; of a progress bar only its last state. Missing files have none."""
    try:
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            handle.seek(max(0, size - TAIL_BYTES))
            data = handle.read(TAIL_BYTES)
    except OSError:
        return []
    lines = [line.rpartition(b"\r")[2] or line for line in data.rstrip(b"\r\n").split(b"\n")]
    shown = [clean(line.decode(errors="replace")) for line in lines if line.strip()]
    return shown[-count:] if count else []


def _decode(line: bytes) -> str:
    return clean(line.rstrip(b"\r").decode(errors="replace"))


class Follower:
    """What was added to a file since the last look, in whole lines."""

    def __init__(
        self,
        path: Path,
        *,
        start_lines: int | None = None,
        within_bytes: int = SKIP_BYTES,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """`read_bytes` at a time; of what is there already only the last `start_lines`, as far as
        they lie in the last `within_bytes`."""
        self.path = path
        self._read_bytes = read_bytes
        self._offset = 0
        self._rest = b""
        if start_lines is not None:
            self._skip_to_last(start_lines, within_bytes)

    def read(self, *, final: bool = False) -> Iterator[str]:
        """New lines. A file that shrank was written anew and is read from its start."""
        return (line for _, line in self.read_placed(final=final))

    def read_placed(self, *, final: bool = False) -> Iterator[tuple[int, str]]:
        """New lines, each with its offset in the file."""
        while (lines := self._read_some()) is not None:
            yield from lines
        if final and self._rest:
            rest, self._rest = self._rest, b""
            yield self._offset - len(rest), _decode(rest)

    def _read_some(self) -> list[tuple[int, str]] | None:
        """The whole lines of the next piece; None at the end of the file."""
        try:
            with self.path.open("rb") as handle:
                if os.fstat(handle.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                handle.seek(self._offset)
                data = handle.read(self._read_bytes)
        except OSError:
            return None
        if not data:
            return None
        place = self._offset - len(self._rest)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            found.append((place, _decode(line)))
            place += len(line) + 1
        if len(self._rest) > LONGEST:
            found.append((place, _decode(self._rest)))
            self._rest = b""
        return found

    def _skip_to_last(self, count: int, within_bytes: int) -> None:
        try:
            with self.path.open("rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                first = max(0, size - within_bytes)
                handle.seek(first)
                data = handle.read(size - first)
        except OSError:
            return
        self._offset = size
        if count == 0:
            return
        body = data[:-1] if data.endswith(b"\n") else data
        end = len(body)
        for _ in range(count):
            end = body.rfind(b"\n", 0, max(end, 0))
            if end < 0:
                break
        self._offset = first + end + 1

"""Read the ends of log files, and what was appended to them, cheaply and safely.

Log lines go to a terminal: characters that could move its cursor or set its title are escaped.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from varuna_core.records.files import open_file, skip_hole

TAIL_BYTES = 64 * 1024
READ_BYTES = 4 * 1024 * 1024
SKIP_BYTES = 16 * 1024 * 1024
"""Maximum distance from the end of a file at which `--lines` searches."""
LONGEST = 1024 * 1024
"""Maximum bytes of a line without an end; longer lines are split."""
ANCHOR_BYTES = 256
SAVED_BYTES = 64
"""Bytes of an anchor that is stored in a file."""
SMALLEST_CUT = 64 * 1024
"""Minimum size of a log that was cut."""
MOVED_BYTES = 256 * 1024 * 1024
"""Maximum distance over which a position is searched for in a log that was cut."""
COLOUR = re.compile(r"\x1b\[[0-9;]{0,40}m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

_SPELLED = {
    ord(sign): f"\\x{ord(sign):02x}" if ord(sign) < 256 else f"\\u{ord(sign):04x}"
    for sign in CONTROL.findall("".join(map(chr, range(0x2070))))
}


def clean(text: str) -> str:
    """Return `text` without its colours, and with other control characters and marks that turn
    text around spelled out, as in `\\x07`; tabs stay."""
    return text if CONTROL.search(text) is None else COLOUR.sub("", text).translate(_SPELLED)


def fold(text: str) -> str:
    """Apply `clean` and join to one line: lines are separated by semicolons, and white space is
    collapsed."""
    joined = re.sub(r"(?<=[\w)\]'\"`])\s*\n\s*(?=\S)", "; ", text)
    return clean(" ".join(joined.split()))


def clean_name(text: str) -> str:
    """Apply `clean` to text that must stay on its line, such as the name of a file."""
    return clean(text).replace("\n", "\\n")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines; of a progress bar only its last state. A missing file has none."""
    try:
        with open_file(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            handle.seek(max(0, size - TAIL_BYTES))
            data = handle.read(TAIL_BYTES)
    except OSError:
        return []
    return show_lines(data, count)


def show_lines(data: bytes, count: int) -> list[str]:
    """Return the last lines of some bytes, without empty ones, with control characters escaped."""
    lines = [line.rpartition(b"\r")[2] or line for line in data.rstrip(b"\r\n").split(b"\n")]
    shown = [clean(line.decode(errors="replace")) for line in lines if line.strip()]
    return shown[-count:] if count else []


def _decode(line: bytes) -> str:
    return clean(line.rstrip(b"\r").decode(errors="replace"))


class Follower:
    """Reader of the complete lines that were added to a file since the last call."""

    def __init__(
        self,
        path: Path,
        *,
        start_lines: int | None = None,
        within_bytes: int = SKIP_BYTES,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """Read `read_bytes` at a time; of the existing content, only the last `start_lines` that
        are within the last `within_bytes`."""
        self.path = path
        self._read_bytes = read_bytes
        self._offset = 0
        self._rest = b""
        self._first = b""
        self._last = b""
        """The last bytes that were read: they locate the position again in a log that was cut."""
        if start_lines is not None:
            self._skip_to_last(start_lines, within_bytes)

    def read(self, *, final: bool = False) -> Iterator[str]:
        """Return new lines. A small file that shrank has been rewritten and is read from its start;
        a large file that shrank was cut, and reading continues at the same content."""
        return (line for _, line in self.read_placed(final=final))

    def read_placed(self, *, final: bool = False) -> Iterator[tuple[int, str]]:
        """Return new lines, each with its offset in the file."""
        while (lines := self._read_some()) is not None:
            yield from lines
        if final and self._rest:
            rest, self._rest = self._rest, b""
            yield self._offset - len(rest), _decode(rest)

    def save(self) -> list[Any]:
        """Return the position of the next whole line, for `go_on`: its offset, and the last bytes
        before it."""
        rest = len(self._rest)
        last = self._last[: max(0, len(self._last) - rest)][-SAVED_BYTES:]
        return [self._offset - rest, base64.b64encode(last).decode()]

    def go_on(self, saved: Any) -> None:
        """Continue from another Follower's saved position in the file, which may have grown."""
        offset, last = saved
        self._offset, self._last = int(offset), base64.b64decode(last)

    def _read_some(self) -> list[tuple[int, str]] | None:
        """Return the whole lines of the next piece; None at the end of the file."""
        try:
            with open_file(self.path) as handle:
                if not self._is_in_place(handle):
                    self._reopen(handle)
                handle.seek(self._offset)
                found = self._pass_hole(handle)
                data = handle.read(self._read_bytes)
        except OSError:
            return None
        if not data:
            return None
        place = self._offset - len(self._rest)
        self._offset += len(data)
        self._last = (self._last + data)[-ANCHOR_BYTES:]
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            found.append((place, _decode(line)))
            place += len(line) + 1
        if len(self._rest) > LONGEST:
            found.append((place, _decode(self._rest)))
            self._rest = b""
        return found

    def _pass_hole(self, handle: BinaryIO) -> list[tuple[int, str]]:
        """Continue after a hole of the file; return the line that ends at the hole, if any."""
        if not self._last or self._last.strip(b"\0"):
            return []
        skip_hole(handle)
        if handle.tell() == self._offset:
            return []
        place, line = self._offset - len(self._rest), self._rest.rstrip(b"\0")
        self._offset, self._rest = handle.tell(), b""
        return [(place, _decode(line))] if line else []

    def _is_in_place(self, handle: BinaryIO) -> bool:
        """Return False if the bytes that were read last are no longer before the position."""
        if not self._first:
            self._first = handle.read(ANCHOR_BYTES)
        if os.fstat(handle.fileno()).st_size < self._offset:
            return False
        handle.seek(self._offset - len(self._last))
        return handle.read(len(self._last)) == self._last

    def _reopen(self, handle: BinaryIO) -> None:
        """Continue in a file that was replaced, or that was cut (`cluster.log_limit_mb`)."""
        first = handle.read(ANCHOR_BYTES) if handle.seek(0) == 0 else b""
        size = handle.seek(0, 2)
        if not first.startswith(self._first) or size < SMALLEST_CUT:
            self._offset, self._rest, self._last, self._first = 0, b"", b"", first
            return
        end = size
        while end > 0 and size - end < MOVED_BYTES and self._last:
            begin = max(0, end - READ_BYTES)
            handle.seek(begin)
            at = handle.read(end - begin).rfind(self._last)
            if at >= 0:
                self._offset = begin + at + len(self._last)
                return
            end = begin + len(self._last) if begin else 0
        self._offset, self._rest, self._last = size, b"", b""

    def _skip_to_last(self, count: int, within_bytes: int) -> None:
        try:
            with open_file(self.path) as handle:
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

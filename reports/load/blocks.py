"""Read large files in bounded memory: blocks of whole lines, and lists that thin out as they
grow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from varuna_core.records.files import open_file, skip_hole

BLOCK_BYTES = 1 << 20
LONGEST_LINE = 1 << 22
"""Maximum length of a line; longer lines were not written by vjob, and are skipped and counted."""


class BlockReader:
    """Iterates over a file in blocks of whole lines, each with its offset in bytes.

    `skipped` counts the skipped lines; `trouble` is the error that ended the reading.

    The last line is yielded even without a line end; the parser decides whether it is complete.
    """

    def __init__(self, path: Path, size: int = BLOCK_BYTES) -> None:
        self.path, self.size = path, size
        self.skipped = 0
        self.trouble = ""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        self.trouble = ""
        try:
            yield from self._read()
        except OSError as error:  # vanished, or its server did
            self.trouble = error.strerror or str(error)

    def _read(self) -> Iterator[tuple[int, bytes]]:
        rest, start, is_passing = b"", 0, False
        with open_file(self.path) as handle:
            while piece := handle.read(self.size):
                if is_passing:
                    _, end, piece = piece.partition(b"\n")
                    start = handle.tell() - len(piece)
                    is_passing = not end
                    if is_passing:
                        skip_hole(handle)
                        continue
                data = rest + piece
                cut = data.rfind(b"\n") + 1
                if cut:
                    yield start, data[:cut]
                start += cut
                rest = data[cut:]
                if len(rest) > LONGEST_LINE:
                    self.skipped += 1
                    rest, is_passing = b"", True
            if rest:
                yield start, rest


def read_spans(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the blocks at the given (offset, length) spans of a file; a block is shorter or missing
    if the file has changed since."""
    try:
        with open_file(path) as handle:
            for start, length in spans:
                handle.seek(start)
                yield handle.read(length)
    except OSError:
        return


MOST_ROWS = 100_000


class Thinned:
    """List that keeps an evenly spread sample of the rows added to it."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self.rows: list[dict[str, Any]] = []
        self.stride = 1
        """One of this many rows is kept."""
        self._most, self._seen = most, 0

    def append(self, row: dict[str, Any]) -> None:
        if self._seen % self.stride == 0:
            self.rows.append(row)
            if len(self.rows) > self._most:
                del self.rows[1::2]
                self.stride *= 2
        self._seen += 1

"""Parse lines of a trace into columns: quickly if they have exactly the writer's form, else one by
one.

Both ways agree on every line that the writer can have written, whole or torn: commas separate an
event's values, and a block with anything else is parsed again with `json.loads`. Small blocks are
parsed many at a time, since a call for each would cost more than the parsing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from varuna_core.records.files import parse_json
from varuna_core.records.logs.trace import COLUMNS

NUMBERS = COLUMNS[1:-1]
_LARGEST = 2**62  # sums of two still fit
_SLOW_LINE = 1 << 16
_TOGETHER_BYTES = 1 << 20

Column = npt.NDArray[Any]
Key = TypeVar("Key")

_NAME = pa.dictionary(pa.int32(), pa.string())
_READ = csv.ReadOptions(column_names=list(COLUMNS), use_threads=False, block_size=1 << 24)
_CONVERT = csv.ConvertOptions(
    column_types={name: _NAME if name not in NUMBERS else pa.int64() for name in COLUMNS},
    null_values=[],
    strings_can_be_null=False,
)


@dataclass(kw_only=True)
class Events:
    """Events as columns; `kinds` and `whats` are indices into their lists of names."""

    columns: dict[str, Column]
    """The columns `step` to `bytes` of COLUMNS."""
    kinds: Column
    kind_names: list[str]
    whats: Column
    what_names: list[str]

    def __len__(self) -> int:
        return len(self.kinds)

    def select(self, rows: slice | Column) -> Events:
        """Return a subset of the events, by index or by a mask."""
        return Events(
            columns={name: values[rows] for name, values in self.columns.items()},
            kinds=self.kinds[rows],
            kind_names=self.kind_names,
            whats=self.whats[rows],
            what_names=self.what_names,
        )


@dataclass(kw_only=True)
class TracePiece:
    """The parsed content of a block of a trace."""

    events: Events | None
    objects: list[dict[str, Any]]
    skipped: int


def parse_lines(data: bytes) -> TracePiece:
    """Parse lines. Each is an event, an object, empty, or counted as skipped."""
    arrays, texts = _split(data)
    objects, skipped = _parse_objects(texts)
    ((events, bad),) = _parse_arrays([arrays])
    return TracePiece(events=events, objects=objects, skipped=skipped + bad)


def parse_pieces(pieces: Iterable[tuple[Key, bytes]]) -> Iterator[tuple[Key, TracePiece]]:
    """Parse many blocks as parse_lines does; yield the content of each with its key, in order."""
    held: list[tuple[Key, bytes]] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece[1])
        if size >= _TOGETHER_BYTES:
            yield from _parse_held(held)
            held, size = [], 0
    yield from _parse_held(held)


def _parse_held(held: Sequence[tuple[Key, bytes]]) -> Iterator[tuple[Key, TracePiece]]:
    split = [_split(data) for _, data in held]
    parsed = _parse_arrays([arrays for arrays, _ in split])
    for (key, _), (_, texts), (events, bad) in zip(held, split, parsed, strict=True):
        objects, skipped = _parse_objects(texts)
        yield key, TracePiece(events=events, objects=objects, skipped=skipped + bad)


def _parse_arrays(pieces: Sequence[bytes]) -> list[tuple[Events | None, int]]:
    """Return the events of each block of event lines, and the number of invalid lines."""
    joined = b"".join(pieces)
    if not joined.strip():
        return [(None, 0)] * len(pieces)
    if len(pieces) == 1:
        try:
            return [_parse_quickly(joined)]
        except (pa.ArrowException, ValueError):
            return [parse_slowly(joined)]
    counts = [piece.count(b"\n[") for piece in pieces]
    try:
        events, bad = _parse_quickly(joined)
    except (pa.ArrowException, ValueError):
        bad = 1
    if bad or len(events) != sum(counts):  # nobody says in which piece: look closer
        half = len(pieces) // 2
        return _parse_arrays(pieces[:half]) + _parse_arrays(pieces[half:])
    found: list[tuple[Events | None, int]] = []
    start = 0
    for count in counts:
        found.append((events.select(slice(start, start + count)) if count else None, 0))
        start += count
    return found


def _split(data: bytes) -> tuple[bytes, list[bytes]]:
    """Separate lines that begin with `{` from all others."""
    lines = b"\n" + data
    pieces, texts, start = [], [], 0
    while (found := lines.find(b"\n{", start)) >= 0:
        pieces.append(lines[start:found])
        start = lines.find(b"\n", found + 1)
        start = len(lines) if start < 0 else start
        texts.append(lines[found + 1 : start])
    pieces.append(lines[start:])
    return b"".join(pieces), texts


def _parse_objects(texts: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    found = parse_json(b"[" + b",".join(texts) + b"]") or []
    if len(found) != len(texts):
        found = [value for value in map(parse_json, texts) if isinstance(value, dict)]
    return found, len(texts) - len(found)


def _parse_quickly(data: bytes) -> tuple[Events, int]:
    """Parse event lines in the writer's exact form; raise an error for any other line."""
    if not data.isascii() or b"\r" in data or b"\\" in data or b"\x00" in data:
        raise ValueError("not a line as the trace writer writes it")
    torn: list[str] = []

    def note(row: csv.InvalidRow) -> str:
        torn.append(row.text)
        return "skip"

    parse = csv.ParseOptions(
        quote_char=False, escape_char=False, newlines_in_values=False, invalid_row_handler=note
    )
    table = csv.read_csv(
        pa.BufferReader(data), read_options=_READ, parse_options=parse, convert_options=_CONVERT
    )
    kinds, kind_names = _decode(table["kind"], '["', '"')
    whats, what_names = _decode(table["what"], '"', '"]')
    columns = {name: table[name].to_numpy() for name in NUMBERS}
    for values in columns.values():
        if len(values) and max(abs(int(values.max())), abs(int(values.min()))) > _LARGEST:
            raise ValueError("not a number that the trace writer writes")
    events = Events(
        columns=columns,
        kinds=kinds,
        kind_names=kind_names,
        whats=whats,
        what_names=what_names,
    )
    return events, sum(1 for text in torn if text.strip())


def _decode(column: Any, before: str, after: str) -> tuple[Column, list[str]]:
    """Return names without their brackets; raise ValueError if one has none."""
    whole = column.unify_dictionaries().combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], _NAME)
    names = []
    for text in whole.dictionary.to_pylist():
        inner = text[len(before) : len(text) - len(after)]
        if text != before + inner + after or '"' in inner or not inner.isprintable():
            raise ValueError("not a name that the trace writer writes")
        names.append(inner)
    return whole.indices.to_numpy(zero_copy_only=False), names


def parse_slowly(data: bytes) -> tuple[Events, int]:
    """Parse event lines one by one with `json.loads`."""
    rows, skipped = [], 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        row = _parse_event(line)
        if row is None:
            skipped += 1
        else:
            rows.append(row)
    named: list[tuple[Column, list[str]]] = []
    for at in (0, len(COLUMNS) - 1):
        names: dict[str, int] = {}
        codes = [names.setdefault(row[at], len(names)) for row in rows]
        named.append((np.array(codes, dtype=np.int32), list(names)))
    columns = {
        name: np.array([row[at] for row in rows], dtype=np.int64)
        for at, name in enumerate(NUMBERS, start=1)
    }
    (kinds, kind_names), (whats, what_names) = named
    events = Events(
        columns=columns,
        kinds=kinds,
        kind_names=kind_names,
        whats=whats,
        what_names=what_names,
    )
    return events, skipped


def _parse_event(line: bytes) -> list[Any] | None:
    if len(line) > _SLOW_LINE:
        return None
    row = parse_json(line)
    if not isinstance(row, list) or len(row) != len(COLUMNS):
        return None
    if not isinstance(row[0], str) or not isinstance(row[-1], str):
        return None
    if all(type(number) is int and abs(number) <= _LARGEST for number in row[1:-1]):
        return row
    return None

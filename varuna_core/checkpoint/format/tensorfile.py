"""Read and write the safetensors layout: header length (8 bytes), JSON header, tensors.

The safetensors library is not used because it writes without fsync and checksums
(docs/decisions/checkpoints.md). Bytes are little endian, as on every machine that torch trains on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from varuna_core.checkpoint.format.errors import DamagedCheckpoint

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""safetensors' names of the types, and the bytes of an element."""

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit; a larger length means that the file is damaged."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """The position and the type of a tensor's bytes in a file; `start` is an offset from the
    beginning of the file."""

    key: str
    dtype: str
    extent: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.extent) * ITEM_BYTES[self.dtype]


def lay_out(
    tensors: Sequence[tuple[str, str, Sequence[int]]], notes: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return the bytes of the file's head, and the offset in the file of each tensor, in the order
    of `tensors`, which are (key, type, extent).

    If the widest types come first, every tensor is aligned.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **notes}}
    at, starts = 0, []
    for key, dtype, extent in tensors:
        starts.append(at)
        end = at + prod(extent) * ITEM_BYTES[dtype]
        if key in header:
            raise ValueError(f"two tensors of one file have the name {key!r}")
        header[key] = {"dtype": dtype, "shape": list(extent), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, [len(head) + start for start in starts]


def read_head(path: Path) -> tuple[bytes, list[Laid]]:
    """Return the head and the tensors' places in any safetensors file, checked against its size."""

    def damaged(what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{path} is not a complete safetensors file: {what}")

    try:
        with path.open("rb") as handle:
            size = path.stat().st_size
            start = handle.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(f"it has {size} bytes")
            text = handle.read(length)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    laid = []
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for key, value in header.items():
            low, high = value["data_offsets"]
            one = Laid(
                key=key,
                dtype=value["dtype"],
                extent=tuple(int(e) for e in value["shape"]),
                start=8 + length + int(low),
            )
            is_negative = low < 0 or min(one.extent, default=0) < 0
            if one.num_bytes != high - low or is_negative or 8 + length + high > size:
                raise damaged(f"{key!r} does not fit in the file")
            laid.append(one)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"the header is damaged or has a later format ({error})") from error
    return start + text, laid

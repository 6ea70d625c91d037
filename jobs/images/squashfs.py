"""What a squashfs image says of itself: whether it is one, and whether all of it is there."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQ")
"""Magic, inodes, time, block size, fragments, compressor, ... root inode, bytes used (4.0)."""
_MAGIC = b"hsqs"
_COMPRESSORS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}


@dataclass(frozen=True, kw_only=True)
class Squashfs:
    """The superblock, which mksquashfs writes last."""

    num_entries: int
    made: int
    """Seconds since 1970."""
    compression: str
    used_bytes: int
    """The file must have as many, or it is cut short."""


def parse_superblock(data: bytes) -> Squashfs | None:
    """None where it is none."""
    if len(data) < _SUPERBLOCK.size:
        return None
    fields = _SUPERBLOCK.unpack_from(data)
    if fields[0] != _MAGIC or fields[9] != 4:
        return None
    return Squashfs(
        num_entries=fields[1],
        made=fields[2],
        compression=_COMPRESSORS.get(fields[5], f"compressor {fields[5]}"),
        used_bytes=fields[12],
    )


def read_squashfs(path: Path) -> Squashfs | None:
    """None where the file is no squashfs image; OSError where it cannot be read."""
    with path.open("rb") as handle:
        return parse_superblock(handle.read(_SUPERBLOCK.size))


def explain_damage(path: Path) -> str:
    """What is wrong with an image file as far as its first bytes tell, or nothing."""
    facts = read_squashfs(path)
    if facts is None:
        return "is not a squashfs image"
    size = path.stat().st_size
    if size < facts.used_bytes:
        return f"is cut short: it has {size} of {facts.used_bytes} bytes; copy or make it again"
    return ""

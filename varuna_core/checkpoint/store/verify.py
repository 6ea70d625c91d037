"""Reads a whole checkpoint and says what is wrong with it. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from varuna_core.checkpoint.format.document import crc_text
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import HeldFile, find_faults, read_manifest
from varuna_core.checkpoint.format.tensorfile import read_head
from varuna_core.checkpoint.store.store import compare_sizes, expect_ours


def find_damage(folder: Path) -> Iterator[str]:
    """Every fault found, each naming its file; nothing from a checkpoint that is as written."""
    try:
        expect_ours(folder)
        manifest = read_manifest(folder)
    except CheckpointError as error:
        yield str(error)
        return
    wrong = compare_sizes(folder, manifest)
    yield from wrong
    yield from (f"{folder}: {fault}" for fault in find_faults(manifest))
    for name, held in manifest.files.items():
        path = folder / name
        if any(text.startswith(f"{path} ") for text in wrong):
            continue
        try:
            yield from _check_file(path, held)
        except (CheckpointError, OSError) as error:
            yield str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"


def _check_file(path: Path, held: HeldFile) -> Iterator[str]:
    head, laid = read_head(path)
    places = {(one.dtype, one.extent, one.start) for one in laid}
    if crc_text(head) != held.head or places != {
        (piece.dtype, piece.box.extent, piece.start) for piece in held.pieces
    }:
        yield f"{path} was changed: its header is not the one that was written"
    with open(path, "rb") as handle:
        for piece in held.pieces:
            for box, start, check in piece.blocks():
                size = (box.extent[0] if box.extent else 1) * piece.row_bytes
                if crc_text(os.pread(handle.fileno(), size, start)) != check:
                    yield (
                        f"{path} was changed: the checksum of {piece.kind} {piece.name!r} differs"
                    )
                    break

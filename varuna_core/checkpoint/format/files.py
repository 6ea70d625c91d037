"""Writes one tensor file: every byte once, checksummed meanwhile, on the disk at the end."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from varuna_core.checkpoint.format.box import whole
from varuna_core.checkpoint.format.document import READABLE, crc_text
from varuna_core.checkpoint.format.entries import Entry
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import BUFFER, WEIGHT, HeldFile, Piece, place
from varuna_core.checkpoint.format.tensorfile import ITEM_BYTES, lay_out


def view_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, of any type; without numpy, which torch may lack."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def key_of(entry: Entry) -> str:
    """What the safetensors header calls it: the plain name, so that other tools know it."""
    plain = entry.kind in (WEIGHT, BUFFER)
    part = "" if entry.box == whole(entry.shape) else str(entry.box)
    return (entry.name if plain else f"{entry.kind}/{entry.name}") + part


def write_file(
    path: Path, entries: Sequence[Entry], notes: dict[str, str], beside: Executor
) -> Future[HeldFile]:
    """A new file of these entries; `beside` computes the checksums, and waits for the disk.

    Holds one tensor in CPU memory at a time, and none that lies there contiguous already.
    """
    entries = sorted(entries, key=lambda entry: -ITEM_BYTES[entry.dtype])
    head, laid = lay_out([(key_of(e), e.dtype, e.box.extent) for e in entries], notes)
    pieces = []
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, READABLE)
    except FileExistsError as error:
        raise CheckpointError(
            f"{path} is there already: two ranks write it (say shared=True in both), or an earlier "
            "start had the same job name"
        ) from error
    try:
        with _named(path):
            _write_all(fd, memoryview(head))
            for entry, at in zip(entries, laid, strict=True):
                piece = place(
                    kind=entry.kind,
                    name=entry.name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    box=entry.box,
                    start=at.start,
                )
                pieces.append(_write_piece(fd, entry, piece, beside))
            size = os.fstat(fd).st_size
    except BaseException:
        os.close(fd)
        raise

    def land() -> HeldFile:
        try:
            with _named(path):
                os.fsync(fd)
        finally:
            os.close(fd)
        return HeldFile(size=size, head=crc_text(head), pieces=tuple(pieces))

    return beside.submit(land)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error


def _write_piece(fd: int, entry: Entry, piece: Piece, beside: Executor) -> Piece:
    tensor = entry.load().detach().cpu().contiguous()
    if tuple(tensor.shape) != entry.box.extent or tensor.element_size() != ITEM_BYTES[entry.dtype]:
        raise CheckpointError(
            f"{entry.kind} {entry.name!r} has changed its shape since it was given"
        )
    data = view_bytes(tensor)
    step = max(1, piece.rows * piece.row_bytes)
    checks: list[Future[str]] = []
    for low in range(0, len(data), step):
        block = data[low : low + step]
        checks.append(beside.submit(crc_text, block))
        _write_all(fd, block)
    return replace(piece, checks=tuple(check.result() for check in checks))


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]

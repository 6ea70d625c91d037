"""Read and write files of torch.distributed.checkpoint, one piece of a tensor at a time.

    .metadata       a pickle: each tensor's type, size and pieces, and each piece's file and offset
    __0_0.distcp    pieces one after another, each as torch.save writes a tensor

torch's own reader unpickles `.metadata`, which runs any code in the file, and its writer holds all
tensors until the last is written. Here the pickle becomes plain values (foreign/pickles.py); a
pickle that names packages other than torch, megatron and those for plain values is refused, and so
is a piece that holds anything except a tensor.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from varuna_core.checkpoint.foreign.pickles import (
    TORN,
    StandIn,
    load_plain_pickle,
    load_torch_file,
)
from varuna_core.checkpoint.format.box import Box, find_fault, whole
from varuna_core.checkpoint.format.entries import DTYPES, Entry
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint

METADATA = ".metadata"
FILE = "__0_0.distcp"
_KNOWN = ("torch", "megatron", "collections", "pathlib", "builtins.getattr")
"""Packages and names that a `.metadata` may refer to; some Python versions pickle enums by
`getattr`."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The file and the bytes of a part of a tensor."""

    box: Box
    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in the files of torch.distributed.checkpoint, not yet read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def read(self, box: Box | None = None) -> Tensor:
        """Return the tensor or the part `box` of it, reading one piece into memory at a time."""
        box = box or whole(self.shape)
        alone = next((piece for piece in self.pieces if piece.box == box), None)
        if alone is not None:
            return self._read_piece(alone)
        made = torch.empty(box.extent, dtype=self.dtype)
        for piece in self.pieces:
            shared = piece.box.intersect(box)
            if shared is not None:
                held = self._read_piece(piece)
                made[shared.seen_from(box).slices] = held[shared.seen_from(piece.box).slices]
        return made

    def _read_piece(self, piece: Piece) -> Tensor:
        try:
            with piece.file.open("rb") as file:
                view = cast(IO[bytes], _View(file, piece.start, piece.num_bytes))
                found = torch.load(view, map_location="cpu", weights_only=True)
        except (*TORN, RuntimeError) as error:
            named = re.findall(r"GLOBAL ([\w.]+)", str(error))
            if named:
                raise CheckpointError(
                    f"{piece.file}: {self.name} was not read: its pickle would call {named[0]}"
                ) from error
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DamagedCheckpoint(f"{piece.file}: {self.name} is damaged: {first}") from error
        if (
            not isinstance(found, Tensor)
            or tuple(found.shape) != piece.box.extent
            or found.dtype != self.dtype
        ):
            raise DamagedCheckpoint(
                f"{piece.file}: {self.name} is not the {self.dtype} tensor of "
                f"{list(piece.box.extent)} that {METADATA} lists there"
            )
        return found


class _View(io.RawIOBase):
    """A read-only file object over a part of another file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        into = into[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(into)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


# Reading.


def list_stored(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, Stored]:
    """Return the tensors with wanted names; raise an error for a missing or incomplete piece."""
    path = folder / METADATA
    metadata = load_plain_pickle(path, _KNOWN)
    try:
        tensors, places = _parse(metadata, folder, is_wanted)
    except (AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise _build_strange(path, error) from error
    sizes: dict[Path, int] = {}
    found = {}
    for name, (shape, dtype, boxes) in tensors.items():
        missing = [box for box in boxes if (name, box.offset) not in places]
        if missing:
            raise DamagedCheckpoint(f"{path} gives no file for {name}{missing[0]}")
        pieces = [
            Piece(box=box, file=file, start=start, num_bytes=num_bytes)
            for box in boxes
            for file, start, num_bytes in [places[name, box.offset]]
        ]
        fault = find_fault(shape, boxes)
        if fault is not None:
            raise DamagedCheckpoint(f"{path}: {name} is not whole: {fault}")
        for piece in pieces:
            _expect_there(name, dtype, piece, sizes)
        found[name] = Stored(name=name, shape=shape, dtype=dtype, pieces=tuple(pieces))
    return found


def list_paths(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the keys that lead to each entry in the saved state dict; empty if not recorded."""
    found = getattr(load_plain_pickle(folder / METADATA, _KNOWN), "planner_data", None)
    if not isinstance(found, dict):
        return {}
    return {str(name): path for name, path in found.items() if isinstance(path, tuple)}


def read_object(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the dict stored under this name as an object (not a tensor); None if there is none."""
    path = folder / METADATA
    metadata = load_plain_pickle(path, _KNOWN)
    try:
        places = [
            _locate(index.fqn, info, folder)
            for index, info in metadata.storage_data.items()
            if index.fqn == name
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise _build_strange(path, error) from error
    for file, start, num_bytes in places:
        try:
            with file.open("rb") as held:
                return load_torch_file(file, cast(IO[bytes], _View(held, start, num_bytes)))
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{file} is missing: it holds {name}") from error
    return None


def _build_strange(path: Path, error: Exception) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is not a checkpoint of torch.distributed.checkpoint: {error}")


_Tensors = dict[str, tuple[tuple[int, ...], torch.dtype, list[Box]]]
_Places = dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]]


def _parse(
    metadata: Any, folder: Path, is_wanted: Callable[[str], bool]
) -> tuple[_Tensors, _Places]:
    """Return shape, type, pieces by name, and file, offset, length by name and piece offset."""
    tensors: _Tensors = {}
    for name, held in metadata.state_dict_metadata.items():
        if _name_class(held) == "TensorStorageMetadata" and is_wanted(str(name)):
            dtype = held.properties.words[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} has no torch dtype")
            boxes = [
                Box(_read_ints(chunk.offsets), _read_ints(chunk.sizes)) for chunk in held.chunks
            ]
            tensors[name] = _read_ints(held.size), dtype, list(dict.fromkeys(boxes))
    places: _Places = {}
    for index, info in metadata.storage_data.items():
        if index.fqn in tensors:
            place = _locate(index.fqn, info, folder)
            places[index.fqn, _read_ints(index.offset)] = place
    return tensors, places


def _locate(name: str, info: Any, folder: Path) -> tuple[Path, int, int]:
    file = str(info.relative_path)
    if Path(file).name != file:
        raise ValueError(f"{name} is in {file!r}, outside the checkpoint's folder")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed, which is not supported")
    start, num_bytes = _read_ints((info.offset, info.length))
    return folder / file, start, num_bytes


def _name_class(held: Any) -> str:
    return held.named.rpartition(".")[2] if isinstance(held, StandIn) else type(held).__name__


def _read_ints(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise ValueError(f"{found!r} are not sizes")
    return found


def _expect_there(name: str, dtype: torch.dtype, piece: Piece, sizes: dict[Path, int]) -> None:
    if piece.file not in sizes:
        try:
            sizes[piece.file] = piece.file.stat().st_size
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{piece.file} is missing: it holds {name}") from error
    end = piece.start + piece.num_bytes
    if end > sizes[piece.file]:
        raise DamagedCheckpoint(
            f"{piece.file} is truncated: it has {sizes[piece.file]} bytes, but {name} ends at {end}"
        )
    if piece.box.volume * dtype.itemsize > piece.num_bytes:
        raise DamagedCheckpoint(
            f"{piece.file}: {piece.num_bytes} bytes cannot hold {name}{piece.box}"
        )


# Writing.


def write_stored(
    folder: Path, entries: Iterable[Entry], objects: Iterable[str], under: str = ""
) -> None:
    """Write these tensors, and objects with the value None, to files in an existing folder.

    `under` is the key of the loaded state dict under which the tensors are found; their names begin
    with it.
    """
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def add(index: MetadataIndex, held: Any, file: BinaryIO) -> None:
        start = file.tell()
        torch.save(held, file)
        places[index] = _StorageInfo(FILE, start, file.tell() - start)

    with (folder / FILE).open("xb") as file:
        for entry in entries:
            offsets, sizes = torch.Size(entry.box.offset), torch.Size(entry.box.extent)
            listed = tensors.setdefault(
                entry.name,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[entry.dtype]),
                    size=torch.Size(entry.shape),
                    chunks=[],
                ),
            )
            assert isinstance(listed, TensorStorageMetadata)
            listed.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            tensor = entry.load()
            if tensor.untyped_storage().nbytes() > entry.num_bytes:
                tensor = tensor.clone()  # else torch.save writes all that it is a view of
            add(MetadataIndex(entry.name, offsets), tensor, file)
        for name in objects:
            tensors[name] = BytesStorageMetadata()
            add(MetadataIndex(name), [None], file)
        file.flush()
        os.fsync(file.fileno())
    paths = {
        name: (under, name.removeprefix(f"{under}.")) if under else (name,) for name in tensors
    }
    metadata = Metadata(state_dict_metadata=tensors, storage_data=places, planner_data=paths)
    with (folder / METADATA).open("xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())

"""Weights in safetensors files, read one tensor at a time when asked for.

    Varuna(model, ..., state_dict=open_weights("gpt2-xl/"))

The format is eight bytes (the header's length, little-endian), a JSON header, and the tensors'
bytes. Only headers are read at first; a stage that takes its own tensors reads no others. Any other
mapping of names to tensors serves as well, such as `torch.load(path, mmap=True)`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""As in the format's own reader."""


class WeightFileError(ValueError):
    """A file of weights cannot be read; the message names it."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where one tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """In the file."""

    size: int
    """In bytes."""


class StoredWeights(Mapping[str, Tensor]):
    """Names to tensors; each access reads the tensor anew."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        content = bytearray(place.size)
        with place.path.open("rb") as file:
            file.seek(place.begin)
            if file.readinto(content) != place.size:
                raise WeightFileError(f"{place.path}: ends within {name!r}")
        if not content:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(content, dtype=place.dtype).view(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def open_weights(*paths: str | Path) -> StoredWeights:
    """The tensors of these safetensors files, or of all such files in a folder."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not found:
            raise WeightFileError(f"{path}: no *.safetensors in this folder")
        files += found
    places: dict[str, _Place] = {}
    for file in files:
        for name, place in _read_header(file).items():
            if name in places:
                raise WeightFileError(f"{name!r} is in {places[name].path} and in {file}")
            places[name] = place
    return StoredWeights(places)


def _read_header(path: Path) -> dict[str, _Place]:
    total = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(total - 8, MAX_HEADER_BYTES):
            raise WeightFileError(f"{path}: no safetensors file, or cut off")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{path}: its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise WeightFileError(f"{path}: its header is no JSON object")
    header.pop("__metadata__", None)
    return {
        name: _read_place(path, name, entry, 8 + length, total) for name, entry in header.items()
    }


def _read_place(path: Path, name: str, entry: Any, start: int, total: int) -> _Place:
    try:
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        numbers = [*shape, begin, end]
        sound = all(type(number) is int and number >= 0 for number in numbers)
        sound = sound and begin <= end <= total - start
        sound = sound and end - begin == math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise WeightFileError(
            f"{path}: the entry of {name!r} is unknown or does not fit: {entry!r}"
        )
    return _Place(path=path, dtype=dtype, shape=shape, begin=start + begin, size=end - begin)

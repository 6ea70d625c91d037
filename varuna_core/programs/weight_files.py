"""Weights in safetensors files, read one tensor at a time when asked for.

    Varuna(model, ..., state_dict=open_weights("gpt2-xl/"))

The format is that of checkpoints' own files (checkpoint/format/tensorfile.py). Only headers are
read at first; a stage that takes its own tensors reads no others. Any other
mapping of names to tensors serves as well, such as `torch.load(path, mmap=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from varuna_core.checkpoint.format.entries import DTYPES
from varuna_core.checkpoint.format.errors import DamagedCheckpoint
from varuna_core.checkpoint.format.tensorfile import Laid, read_head


class WeightFileError(ValueError):
    """A file of weights cannot be read; the message names it."""


class StoredWeights(Mapping[str, Tensor]):
    """Names to tensors; each access reads the tensor again."""

    def __init__(self, places: Mapping[str, tuple[Path, Laid]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        path, laid = self._places[name]
        content, dtype = bytearray(laid.num_bytes), DTYPES[laid.dtype]
        with path.open("rb") as file:
            file.seek(laid.start)
            if file.readinto(content) != laid.num_bytes:
                raise WeightFileError(f"{path}: ends within {name!r}")
        if not content:
            return torch.empty(laid.extent, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(laid.extent)

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
    places: dict[str, tuple[Path, Laid]] = {}
    for file in files:
        try:
            _, tensors = read_head(file)
        except DamagedCheckpoint as error:
            raise WeightFileError(str(error)) from error
        for laid in tensors:
            if laid.key in places:
                raise WeightFileError(f"{laid.key!r} is in {places[laid.key][0]} and in {file}")
            places[laid.key] = file, laid
    return StoredWeights(places)

"""Read weights from safetensors files lazily, one tensor at a time.

    Varuna(model, ..., options=Options(state_dict=open_weights("gpt2-xl/")))

The format is that of checkpoints' own files (checkpoint/format/tensorfile.py). Only headers are
read at first; a stage that takes its own tensors reads no others. Any other
mapping of names to tensors serves as well, such as `torch.load(path, mmap=True)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from varuna_core.checkpoint.format.entries import DTYPES, Entry
from varuna_core.checkpoint.format.errors import DamagedCheckpoint
from varuna_core.checkpoint.format.remote import parse_path
from varuna_core.checkpoint.format.tensorfile import Laid, read_head

if TYPE_CHECKING:
    from varuna_core.checkpoint.foreign.torch_dcp import DcpWeights

INDEX = ".safetensors.index.json"
SINGLE = "model.safetensors"


class WeightFileError(ValueError):
    """Raised if a file of weights cannot be read; the message names the file."""


class StoredWeights(Mapping[str, Tensor]):
    """Mapping from names to tensors; each access reads the tensor again."""

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

    def holds(self, name: str) -> bool:
        """Return True if the tensor exists; unlike `in`, this does not read it."""
        return name in self._places

    def describe(self, name: str) -> Laid:
        """Return type, shape and size without reading the tensor."""
        return self._places[name][1]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.describe(name).extent

    def take_optimizer(self, kind: str) -> tuple[list[Entry], dict[str, Any]]:
        raise WeightFileError(f"safetensors files hold no state of {kind}: remove --optimizer")


Weights: TypeAlias = "StoredWeights | DcpWeights"


def open_weights(*paths: str | Path) -> Weights:
    """Open safetensors files lazily. For a folder, these are the files that its index lists, or its
    model.safetensors, or else all such files in it; for a torch.distributed.checkpoint folder, the
    model's tensors are opened. A path may be a URL that fsspec opens."""
    places: dict[str, tuple[Path, Laid]] = {}
    if len(paths) == 1 and (parse_path(paths[0]) / ".metadata").exists():
        from varuna_core.checkpoint.foreign.torch_dcp import DcpWeights

        return DcpWeights(parse_path(paths[0]))
    for path in map(parse_path, paths):
        listed = _list_files(path) if path.is_dir() else {path: None}
        for file, names in listed.items():
            for laid in _read_file(file, names):
                if laid.key in places:
                    raise WeightFileError(f"{laid.key!r} is in {places[laid.key][0]} and in {file}")
                places[laid.key] = file, laid
    return StoredWeights(places)


def _list_files(folder: Path) -> Mapping[Path, set[str] | None]:
    """Return the files of a folder, each with the names of tensors to use; None means all."""
    indices = sorted(folder.glob(f"*{INDEX}"))
    if len(indices) > 1:
        raise WeightFileError(f"{indices[0]} and {indices[1].name}: pass the files of one index")
    if indices:
        return _read_index(indices[0])
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        others = [path.name for path in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))]
        hint = f"; it has {others[0]}: load that with torch.load(..., mmap=True)" if others else ""
        raise WeightFileError(f"{folder}: no *.safetensors in this folder{hint}")
    return dict.fromkeys(found)


def _read_index(index: Path) -> Mapping[Path, set[str] | None]:
    try:
        listed = json.loads(index.read_text())["weight_map"]
        files: dict[Path, set[str] | None] = {
            index.parent / name: set() for name in listed.values()
        }
        for name, file in listed.items():
            names = files[index.parent / file]
            assert names is not None
            names.add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{index}: not an index of safetensors files ({error})") from error
    for file in files:
        if not file.is_file():
            raise WeightFileError(f"{file} is missing, but {index.name} lists it")
    return files


def _read_file(file: Path, names: set[str] | None) -> list[Laid]:
    try:
        _, tensors = read_head(file)
    except DamagedCheckpoint as error:
        raise WeightFileError(str(error)) from error
    lost = sorted((names or set()) - {laid.key for laid in tensors})
    if lost:
        raise WeightFileError(f"{file} lacks {lost[0]!r}, which its folder's index lists there")
    for laid in tensors:
        if laid.dtype not in DTYPES:
            raise WeightFileError(f"{file}: {laid.key!r} has unsupported type {laid.dtype}")
    return [laid for laid in tensors if names is None or laid.key in names]

"""Read and write torch.distributed.checkpoint folders of FSDP2, torchtitan and plain programs.

    dcp.save({"model": .., "optimizer": ..}, folder)        model.h.0.weight, optimizer.state.h.0...
    dcp.save(model.state_dict(), folder), torchtitan        h.0.weight, optimizer.state.h.0...

Each tensor, or a part of it, is read separately from the pieces of any number of ranks. Objects
other than tensors (options, data loaders) are ignored because they would have to be unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.foreign.distcp import (
    METADATA,
    Stored,
    list_paths,
    list_stored,
    write_stored,
)
from varuna_core.checkpoint.format.document import make_folder
from varuna_core.checkpoint.format.entries import Entry, name_dtype
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.tensorfile import Laid
from varuna_core.checkpoint.store.exchange import list_stored_names, name_stored
from varuna_core.checkpoint.store.reader import OPTIMIZER, CheckpointReader
from varuna_core.checkpoint.store.torch_state import take_state

CONTAINERS = ("model", "module", "state_dict", "app")
"""Keys that programs put the model's state dict under."""
_STATE = re.compile(r"(?:optimizers?|optim)\.state\.(.+)\.([^.]+)")
_OTHER = re.compile(r"(?:optimizers?|optim|lr_scheduler|scheduler|dataloader|train_state|rng)\b.*")


def is_plain_dcp(folder: Path) -> bool:
    """Return True for a torch.distributed.checkpoint folder that is not Megatron-LM's."""
    theirs = ("common.pt", "metadata.json")
    return (folder / METADATA).is_file() and not any((folder / name).is_file() for name in theirs)


class DcpWeights(Mapping[str, Tensor]):
    """Mapping from parameter names to the tensors of a torch DCP checkpoint. Tensors are not kept:
    each access reads the tensor from the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stored, paths = list_stored(folder, lambda name: True), list_paths(folder)
        named = {name: _name_tensor(name, paths.get(name, ())) for name in stored}
        inside = {name for name, (is_inside, _) in named.items() if is_inside}
        self._held = {
            named[name][1]: one
            for name, one in stored.items()
            if name in inside or (not inside and not _OTHER.fullmatch(name))
        }
        self._state = {
            (match[1], match[2]): one
            for name, one in stored.items()
            if (match := _STATE.fullmatch(name))
        }
        if not self._held:
            raise CheckpointError(f"{folder} holds no model tensors")

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, name: str) -> bool:
        """Return True if the tensor exists; unlike `in`, this does not read it."""
        return name in self._held

    def describe(self, name: str) -> Laid:
        """Return type and shape without reading the tensor."""
        one = self._held[name]
        return Laid(key=name, dtype=name_dtype(one.dtype, name), extent=one.shape, start=0)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._held[name].shape

    def take_optimizer(self, kind: str) -> tuple[list[Entry], dict[str, Any]]:
        """Return the tensors of the optimizer's state as entries, and its other state by parameter,
        for `save_weights`."""
        by_name: dict[str, dict[str, Stored]] = {}
        for (name, key), one in self._state.items():
            by_name.setdefault(name, {})[key] = one
        lost = next((name for name in by_name if name not in self._held), None)
        if lost is not None or not by_name:
            what = f"state of {lost!r}, but no such tensor" if by_name else "no optimizer state"
            raise CheckpointError(f"{self.folder} has {what}: remove --optimizer")
        entries: list[Entry] = []
        trees: dict[str, Any] = {}
        for name, state in by_name.items():
            bare = {
                key: torch.empty(one.shape, dtype=one.dtype, device="meta")
                for key, one in state.items()
            }
            like = torch.empty(self._held[name].shape, device="meta")
            made, tree = take_state(name, like, bare)
            for entry in made:
                read = state[entry.kind.removeprefix(OPTIMIZER)].read
                entries.append(entry._replace(load=read))
            trees[name] = {"optimizer": kind, "options": {}, "state": tree}
        return entries, trees


def _name_tensor(name: str, path: tuple[Any, ...]) -> tuple[bool, str]:
    """Return True if the tensor is under one of `CONTAINERS`, and the model's name for it."""
    if len(path) > 1 and path[0] in CONTAINERS:
        inner = path[1:]
        while len(inner) > 1 and inner[0] in CONTAINERS:
            inner = inner[1:]
        return True, ".".join(map(str, inner))
    return False, name


def export_dcp(folder: Path, target: Path, *, under: str = "") -> int:
    """Export the weights and buffers of a checkpoint to a new folder that `dcp.load` reads in any
    layout, each under all its names; return their number. `under` is the key of the state dict."""
    with CheckpointReader(folder) as reader, make_folder(target) as part:
        part.mkdir(parents=True)
        names = list(dict.fromkeys([*reader.state.shapes, *list_stored_names(reader)]))
        entries = (_spell(reader, name, under) for name in names)
        write_stored(part, entries, (), under)
    return len(names)


def _spell(reader: CheckpointReader, name: str, under: str) -> Entry:
    return name_stored(reader, name)._replace(name=f"{under}.{name}" if under else name)

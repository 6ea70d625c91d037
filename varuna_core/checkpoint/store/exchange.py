"""Export to and import from one plain state dict: a safetensors file, or one of `torch.save`.

Files of `torch.save` are read with `weights_only=True`, so that no code in them runs.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from varuna_core.checkpoint.format.box import whole
from varuna_core.checkpoint.format.document import sync_folder
from varuna_core.checkpoint.format.entries import (
    DTYPES,
    CheckpointPart,
    Entry,
    make_entry,
    view_bytes,
    write_file,
)
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import BUFFER, WEIGHT, TrainingState, find_leads
from varuna_core.checkpoint.format.tensorfile import Laid, read_head
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.writer import CheckpointWriter

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin")


def export_checkpoint(folder: Path, target: Path) -> int:
    """Export weights and buffers to one file, tied ones under each of their names; return the
    number of names."""
    with CheckpointReader(folder) as reader:
        names = list(dict.fromkeys([*reader.state.shapes, *list_stored_names(reader)]))
        leads = find_leads(reader.state.ties)
        entries = [name_stored(reader, name) for name in names]
        write_state_dict(target, entries, leads, {"iteration": str(reader.iteration)})
    return len(names)


def check_target(target: Path) -> None:
    if target.suffix not in (SAFETENSORS, *TORCH):
        raise CheckpointError(f"{target}: its name must end in {SAFETENSORS} or {TORCH[0]}")


def write_state_dict(
    target: Path, entries: Sequence[Entry], leads: Mapping[str, str], notes: Mapping[str, str]
) -> None:
    """Write these tensors to a file, atomically.

    `leads` maps each tied name to the first name of its group. A safetensors file is written tensor
    by tensor, the widest types first and otherwise in the given order; for `torch.save` all tensors
    are held in memory.
    """
    check_target(target)
    part = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        if target.suffix == SAFETENSORS:
            with ThreadPoolExecutor(1) as beside:
                write_file(part, entries, dict(notes), beside).result()
        else:
            held: dict[str, Tensor] = {}
            for entry in entries:
                lead = leads.get(entry.name, entry.name)
                held[entry.name] = held[lead] if lead in held else entry.load()
            with open(part, "xb") as handle:
                torch.save(held, handle)
                handle.flush()
                os.fsync(handle.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(target.parent)


def list_stored_names(reader: CheckpointReader) -> list[str]:
    return [*reader.names(WEIGHT), *reader.names(BUFFER)]


def name_stored(reader: CheckpointReader, name: str) -> Entry:
    """Return an entry for a whole tensor of a checkpoint; the tensor is read when it is written."""
    shape = reader.shape(name)
    word = next(word for word, dtype in DTYPES.items() if dtype == reader.dtype(name))
    return Entry(
        kind=WEIGHT,
        name=name,
        shape=shape,
        box=whole(shape),
        dtype=word,
        load=lambda: reader.read(name),
    )


def import_checkpoint(
    source: Path, store: Path, iteration: int = 0, ties: Sequence[Sequence[str]] = ()
) -> Path:
    """Import weights as a checkpoint, which any layout loads; return its folder.

    Names that share memory in a file of `torch.save` are tied; `ties` has further groups of tied
    names.
    """
    entries, shared = read_entries(source)
    ties = [*ties, *shared]
    return save_weights(store, entries, ties, iteration, source.name)


def read_entries(source: Path) -> tuple[list[Entry], list[list[str]]]:
    """Return the tensors of a file and, for `torch.save`, the groups of names that share memory."""
    if source.suffix == SAFETENSORS:
        return _open_safetensors(source), []
    tensors = _load_torch(source)
    return [make_entry(WEIGHT, name, tensor) for name, tensor in tensors.items()], _find_ties(
        tensors
    )


def save_weights(
    store: Path,
    entries: Sequence[Entry],
    ties: Sequence[Sequence[str]],
    iteration: int,
    source: str,
    optimizer: Mapping[str, Any] = MappingProxyType({}),
    model: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint of these weights and optimizer entries; return its folder.

    Only the first name of each tie must have an entry. `optimizer` holds what `take_state`
    returned, `model` the facts about a built-in program's model that its tensors do not show.
    """
    held = {entry.name: entry for entry in entries if entry.kind == WEIGHT}
    for names in ties:
        _check_tie(held, names)
    later = {name for names in ties for name in names[1:]}
    shapes = {name: entry.shape for name, entry in held.items()}
    shapes |= {name: shapes[names[0]] for names in ties for name in names}
    writer = CheckpointWriter(store, job=f"import-{uuid4().hex[:12]}")
    writer.save(
        CheckpointPart(
            iteration=iteration,
            segments={0: [entry for entry in entries if entry.name not in later]},
            optimizer={name: tree for name, tree in optimizer.items() if name not in later},
            state=TrainingState(
                partition="",
                shapes=shapes,
                ties=[list(names) for names in ties],
                user={"imported from": source} | ({"model": dict(model)} if model else {}),
            ),
        )
    )
    writer.close()
    return store / f"varuna_ckpt_{iteration}"


def _open_safetensors(source: Path) -> list[Entry]:
    _, laid = read_head(source)
    entries = []
    for one in laid:
        if one.dtype not in DTYPES:
            raise CheckpointError(
                f"{source}: {one.key!r} has type {one.dtype}, which is not supported"
            )
        entries.append(
            Entry(
                kind=WEIGHT,
                name=one.key,
                shape=one.extent,
                box=whole(one.extent),
                dtype=one.dtype,
                load=_load_laid(source, one),
            )
        )
    return entries


def _load_laid(source: Path, one: Laid) -> Callable[[], Tensor]:
    def load() -> Tensor:
        made = torch.empty(one.extent, dtype=DTYPES[one.dtype])
        with open(source, "rb") as handle:
            handle.seek(one.start)
            if handle.readinto(view_bytes(made)) != one.num_bytes:
                raise CheckpointError(f"{source} is cut short")
        return made

    return load


def _load_torch(source: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        first = str(error).strip().splitlines()[0]
        text = f"{source} cannot be read safely as a state dict: {first}"
        raise CheckpointError(text) from error
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror}") from error
    if isinstance(found, Mapping):
        for key in ("state_dict", "model", "module"):
            if isinstance(found.get(key), Mapping):
                found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise CheckpointError(f"{source} holds a {type(found).__name__}, not a state dict")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise CheckpointError(f"{source}: {name!r} is a {kind}, so it is not a state dict")
    return dict(found)


def _find_ties(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return groups of names for one tensor: equal memory, shape, strides and type."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _check_tie(held: Mapping[str, Entry], names: Sequence[str]) -> None:
    if names[0] not in held:
        raise CheckpointError(f"tied {names[0]!r} is not in the file")
    first = held[names[0]]
    for name in filter(held.__contains__, names[1:]):
        other = held[name]
        if other.shape != first.shape or not torch.equal(other.load(), first.load()):
            raise CheckpointError(f"{names[0]!r} and {name!r} are not equal, so they are not tied")

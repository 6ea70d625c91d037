"""Checkpoints of DeepSpeed's pipelines to ours, and the other way: weights alone.

    global_step100/layer_03-model_01-model_states.pt    a file a layer, and a tensor rank if cut
                   mp_rank_00_model_states.pt           steps, and what a script saved beside

Layers with the names of Megatron-DeepSpeed's GPT become pretrain_gpt's model; others keep their
names, with the layer's number before them, as a `Sequential` of the pipeline's layers has them.
Which number a layer has differs by release: an export takes the files of a checkpoint of theirs as
its pattern.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.foreign.megatron import (
    PARTS,
    GptReader,
    expect_known_order,
    join_parts,
    list_differences,
    list_entries,
    make_lazy_entry,
    read_args,
    refuse_differences,
)
from varuna_core.checkpoint.foreign.names import TIES
from varuna_core.checkpoint.foreign.pickles import load_torch_file
from varuna_core.checkpoint.format.document import make_folder
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint
from varuna_core.checkpoint.store.exchange import save_weights
from varuna_core.checkpoint.store.reader import CheckpointReader

LATEST = "latest"
STEPS = "mp_rank_00_model_states.pt"
_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_OUTSIDE = {
    "word_embeddings.weight": "tokens.weight",
    "position_embeddings.weight": "positions.weight",
    "final_layernorm.weight": "norm.weight",
    "final_layernorm.bias": "norm.bias",
    "weight": "norm.weight",
    "bias": "norm.bias",
}


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The files of a checkpoint, by layer and tensor rank."""

    files: dict[int, dict[int, Path]]

    @property
    def num_halves(self) -> int:
        return max(half for held in self.files.values() for half in held) + 1


def find_folder(path: Path, iteration: int | None = None) -> Path | None:
    """The folder of a checkpoint: the path itself, or in it the one of that step, or the latest."""
    if not path.is_dir():
        return None
    if _list_layers(path).files:
        return path
    if iteration is not None:
        found = path / f"global_step{iteration}"
        if (path / LATEST).is_file() and not found.is_dir():
            raise NoCheckpoint(f"{path} has no {found.name}")
    else:
        try:
            found = path / (path / LATEST).read_text().strip()
        except OSError:
            return None
    return found if found.is_dir() and _list_layers(found).files else None


def _list_layers(folder: Path) -> Layers:
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            found.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
    return Layers(files=dict(sorted(found.items())))


def import_deepspeed(
    folder: Path,
    store: Path,
    *,
    iteration: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    sequence: int | None = None,
) -> Path:
    """A checkpoint of the weights, its folder."""
    layers = _list_layers(folder)
    common = load_torch_file(folder / STEPS) if (folder / STEPS).is_file() else {}
    number = iteration if iteration is not None else _read_iteration(common, folder)
    read = {
        index: {half: load_torch_file(path) for half, path in held.items()}
        for index, held in layers.files.items()
    }
    if not any(
        "word_embeddings.weight" in state for held in read.values() for state in held.values()
    ):
        if layers.num_halves > 1:
            raise CheckpointError(
                f"{folder} has layers of {layers.num_halves} tensor ranks, and they are not "
                "Megatron-DeepSpeed's: how they are cut is not known"
            )
        entries = [
            make_lazy_entry(f"{index}.{name}", tuple(t.shape), t.dtype, lambda t=t: t)  # type: ignore[misc]
            for index, held in read.items()
            for name, t in _list_tensors(held[0], layers.files[index][0])
        ]
        return save_weights(store, entries, (), number, folder.name)
    expect_known_order(common, folder)
    args = read_args(common) or {}
    refuse_differences(list_differences(args), folder)
    heads = heads or args.get("num_attention_heads")
    if not isinstance(heads, int):
        raise CheckpointError(
            f"{folder} does not say how many attention heads its model has: add --heads"
        )
    tensors: dict[str, list[Tensor]] = {}
    copies: dict[str, list[Tensor]] = {}
    num_blocks = 0
    for index, held in read.items():
        names = _name_layer(held, layers.files[index], num_blocks)
        num_blocks += any(name.startswith("blocks.") for name in names.values())
        for half in range(layers.num_halves):
            if half not in held:
                raise DamagedCheckpoint(f"{folder}: layer {index} has no model_{half:02d}")
        for theirs, ours in names.items():
            parts = [held[half][theirs] for half in range(layers.num_halves)]
            if ours in tensors:
                copies[ours] = parts
            else:
                tensors[ours] = parts
    joined = {n: join_parts(n, parts, folder) for n, parts in tensors.items()}
    for name, parts in copies.items():  # the head's layer holds the embedding again
        if not all(map(torch.equal, parts, tensors[name])):
            raise CheckpointError(f"{folder}: its layers hold two {name} that are not equal")
    entries = list_entries(joined, folder, heads=heads, vocab=vocab, sequence=sequence)
    return save_weights(store, entries, [TIES["pretrain_gpt"]], number, folder.name, heads=heads)


def _read_iteration(common: Mapping[str, Any], folder: Path) -> int:
    found = common.get("global_steps")
    match = re.search(r"(?<!\d)(\d+)$", folder.resolve().name)
    return found if isinstance(found, int) else int(match[1]) if match else 0


def _list_tensors(state: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a tensor")
        yield name, value


def _name_layer(
    held: Mapping[int, Mapping[str, Any]], files: Mapping[int, Path], number: int
) -> dict[str, str]:
    """Our name of each tensor of a layer; `number` is that of the block, if it is one."""
    found = {}
    for name, _ in _list_tensors(held[min(held)], files[min(held)]):
        part, _, kind = name.rpartition(".")
        if name in _OUTSIDE:
            found[name] = _OUTSIDE[name]
        elif part in PARTS:
            found[name] = f"blocks.{number}.{PARTS[part]}.{kind}"
        else:
            path = files[min(held)]
            raise CheckpointError(f"{path} has {name!r}, which pretrain_gpt's model does not have")
    return found


def export_deepspeed(
    folder: Path,
    target: Path,
    *,
    like: Path,
    heads: int | None = None,
    vocab: int | None = None,
) -> Path:
    """pretrain_gpt's checkpoint in this folder as files like those of a DeepSpeed checkpoint of the
    same model: their layers, tensor ranks and types. What else lies there is copied as it is, its
    steps too; the optimizer's state is not."""
    pattern = find_folder(like)
    if pattern is None:
        raise NoCheckpoint(f"{like} has no checkpoint of a DeepSpeed pipeline")
    layers = _list_layers(pattern)
    common = load_torch_file(pattern / STEPS) if (pattern / STEPS).is_file() else {}
    expect_known_order(common, pattern)
    with make_folder(target) as part, CheckpointReader(folder) as reader:
        place = part / f"global_step{reader.iteration}"
        place.mkdir(parents=True)
        model = GptReader.of(reader, heads, vocab)
        model.expect_to_divide(layers.num_halves, 1)
        _write_layers(model, layers, place)
        for path in pattern.glob("mp_rank_*_model_states.pt"):
            shutil.copyfile(path, place / path.name)
        (part / LATEST).write_text(place.name)
    return target / place.name


def _write_layers(model: GptReader, layers: Layers, place: Path) -> None:
    number = 0
    written: set[str] = set()
    for held in layers.files.values():
        states = {half: load_torch_file(path) for half, path in held.items()}
        names = _name_layer(states, held, number)
        number += any(name.startswith("blocks.") for name in names.values())
        written |= set(names.values())
        for half, path in held.items():
            made: dict[str, Tensor] = {}
            for theirs, ours in names.items():
                wanted = states[half][theirs]
                tensor = model.load_part(ours, half, layers.num_halves)
                if tensor.shape != wanted.shape:
                    raise CheckpointError(
                        f"{ours} is {list(tensor.shape)} for a rank, {path} has {theirs!r} as "
                        f"{list(wanted.shape)}"
                    )
                made[theirs] = tensor.to(wanted.dtype)
            with (place / path.name).open("xb") as file:
                torch.save(made, file)
                file.flush()
                os.fsync(file.fileno())
    missing = model.names - written
    if missing:
        raise CheckpointError(f"the pattern has no {sorted(missing)[0]}: it is of another model")

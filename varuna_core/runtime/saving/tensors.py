"""What a rank gives to a checkpoint by segment, in plain names, and what it wants of one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from varuna_core.checkpoint.format.box import Box, Share
from varuna_core.checkpoint.format.entries import Entry, make_entry
from varuna_core.checkpoint.format.manifest import BUFFER, WEIGHT
from varuna_core.checkpoint.store.reader import Wanted
from varuna_core.runtime.optim.precision import Masters
from varuna_core.runtime.saving.optimizer_restore import list_options, take_optimizer
from varuna_core.runtime.split.record import tensor_names
from varuna_core.runtime.split.split import RankStages, Split
from varuna_core.runtime.tensor_parallel.shares import Shares


def list_tensors(split: Split) -> tuple[dict[str, tuple[int, ...]], list[list[str]]]:
    """The shapes of parameters and persistent buffers under all their names, and which are one."""
    model = split.model
    persistent = model.state_dict().keys()
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    held: dict[str, Tensor] = {
        **parameters,
        **{n: b for n, b in buffers.items() if n in persistent},
    }
    ties = [list(names) for name, names in split.groups.items() if names[0] == name and names[1:]]
    for names in tensor_names(model).values():
        kept = [name for name in names if name in held and name not in parameters]
        ties += [kept] if kept[1:] else []
    return {name: tuple(tensor.shape) for name, tensor in held.items()}, ties


def take_tensors(
    split: Split, part: RankStages, masters: Masters, optimizer: Any
) -> tuple[dict[int, list[Entry]], dict[str, Any]]:
    """Weights and optimizer state that this rank answers for, by segment, and the rest of that
    state, by name. A weight of several stages is the first one's."""
    segments: dict[int, list[Entry]] = {}
    trees: dict[str, Any] = {}
    options = list_options(optimizer)
    for stage in part.stages:
        for name in stage.parameters():
            if split.groups[name][0] != name or split.owners(name)[0] != stage.index:
                continue
            if not masters.answers_for(name):
                continue
            master = masters.by_name[name]
            entries, tree = take_optimizer(name, master, optimizer, options)
            held = segments.setdefault(min(split.segments[name]), [])
            held += [make_entry(WEIGHT, name, master), *entries]
            if tree is not None:
                trees[name] = tree
    for name, rows in masters.slices.items():
        master = masters.by_name[name]
        entries, tree = take_optimizer(name, master, optimizer, options, rows.box, rows.shape)
        if rows.box.volume:
            made = [make_entry(WEIGHT, name, master, rows.box, rows.shape), *entries]
            of_rows = [entry for entry in made if rows.is_first or entry.shape == rows.shape]
            segments.setdefault(rows.segment, []).extend(of_rows)
        if tree is not None:
            trees[name] = tree
    return segments, trees


def take_buffers(split: Split, part: RankStages, kept: Collection[str]) -> dict[int, list[Entry]]:
    """Those of `kept` that this rank's stages answer for."""
    segments: dict[int, list[Entry]] = {}
    for name, buffer in part.buffers().items():
        if name in kept:
            segment = min(split.record.changes.get(name) or split.segments[name])
            segments.setdefault(segment, []).append(make_entry(BUFFER, name, buffer))
    return segments


def find_part(name: str, masters: Masters, shares: Shares) -> Box | Share | None:
    """What this rank holds of a tensor; None is all of it."""
    rows = masters.slices.get(name)
    return shares.find(name) if rows is None else rows.box


def list_wanted(name: str, out: Tensor, masters: Masters, shares: Shares) -> list[Wanted]:
    """What to read of a tensor into what this rank holds of it."""
    rows = masters.slices.get(name)
    return (
        shares.list_wanted(name, out)
        if rows is None
        else [Wanted(name=name, out=out, box=rows.box)]
    )

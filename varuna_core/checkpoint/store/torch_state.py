"""Convert the states of torch's optimizers and of random generators for a checkpoint.

An optimizer's state of one parameter is its tensors as entries and the rest as JSON; generators'
states are `CheckpointPart.own`."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.format.box import Box
from varuna_core.checkpoint.format.entries import Entry, make_entry
from varuna_core.checkpoint.format.plain import to_plain
from varuna_core.checkpoint.store.reader import OPTIMIZER


def take_state(
    name: str,
    parameter: Tensor,
    state: Any,
    box: Box | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[list[Entry], Any]:
    """Return entries for `CheckpointPart.segments`, and the rest for
    `CheckpointPart.optimizer[name]`.

    If `box` and `shape` are given, the parameter is a piece, and so is every state tensor of its
    shape; other state tensors, such as a step count, are whole and must be written by one rank
    only.
    """
    entries: list[Entry] = []

    def place(path: str, tensor: Tensor) -> str:
        key = path.partition("/")[2]  # after "state"
        if tensor.shape == parameter.shape:
            entries.append(make_entry(OPTIMIZER + key, name, tensor, box, shape))
        else:
            entries.append(make_entry(OPTIMIZER + key, name, tensor))
        return key

    tree = to_plain(state, "state", place)
    return entries, tree


def take_random_state() -> dict[str, Any]:
    """Return the states of the random generators of Python, torch and, if loaded, numpy."""
    taken: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        taken["cuda"] = torch.cuda.get_rng_state_all()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        taken["numpy"] = [name, keys.tolist(), *rest]
    return taken


def put_random_state(taken: dict[str, Any]) -> None:
    """Restore the states; ignore those of generators that this process lacks."""
    random.setstate(taken["python"])
    torch.set_rng_state(taken["torch"])
    if "cuda" in taken and torch.cuda.is_available():
        for device, state in enumerate(taken["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    if "numpy" in taken:
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.set_state(tuple(taken["numpy"]))

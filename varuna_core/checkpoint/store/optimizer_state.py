"""Any torch optimizer's state of one parameter: its tensors as entries, the rest as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Entries for `RankPart.segments`, and the rest for `RankPart.optimizer[name]`.

    With `box` and `shape` the parameter is a piece, and so is every state tensor of its shape;
    others, such as a step count, are whole: one rank gives them.
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

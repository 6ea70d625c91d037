"""Inputs of the model by the names of its forward: a batch may be a tuple or a list, as loaders
give it, and then its entries are the forward's parameters in their order."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from varuna_core.runtime.engine.microbatch import GetBatch

Inputs = Mapping[str, Any] | Sequence[Any]


class InputNames:
    """The names of what a model's forward may be given by its place."""

    def __init__(self, model: nn.Module) -> None:
        known = inspect.signature(model.forward).parameters.values()
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [each.name for each in known if each.kind in by_place]

    def name(self, inputs: Inputs) -> Mapping[str, Any]:
        """A batch by names."""
        if isinstance(inputs, Mapping):
            return inputs
        return self.bind([inputs] if isinstance(inputs, Tensor) else inputs, {})

    def name_all(self, batches: Inputs | GetBatch) -> Mapping[str, Any] | GetBatch:
        """A batch, or what a function makes, by names."""
        if callable(batches):
            make = batches
            return lambda *args: self.name(make(*args))
        return self.name(batches)

    def bind(self, by_place: Sequence[Any], by_name: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by names."""
        if len(by_place) > len(self.names):
            raise TypeError(
                f"{len(by_place)} inputs, of which the model's forward takes {len(self.names)} by "
                f"place ({', '.join(self.names) or 'none'}): give them in a dict, by name"
            )
        placed = dict(zip(self.names, by_place, strict=False))
        twice = placed.keys() & by_name
        if twice:
            raise TypeError(f"input {min(twice)!r} is given by place and by name")
        return placed | dict(by_name)

"""Map a model's inputs to the parameter names of its forward. A batch may also be a tuple or a
list, as returned by data loaders; its entries are then the forward's parameters in order."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from varuna_core.runtime.engine.microbatch import GetBatch

Inputs = Mapping[str, Any] | Sequence[Any]


class InputNames:
    """Names of the parameters of a model's forward that may be passed by position."""

    def __init__(self, model: nn.Module) -> None:
        known = inspect.signature(model.forward).parameters.values()
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [each.name for each in known if each.kind in by_place]
        self._all = [each.name for each in known]
        self._is_open = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known)

    def name(self, inputs: Inputs) -> Mapping[str, Any]:
        """Return the batch as a mapping from parameter names to values."""
        if isinstance(inputs, Mapping):
            unknown = [name for name in inputs if name not in self._all]
            if unknown and not self._is_open:
                raise TypeError(
                    f"the batch has {', '.join(map(repr, unknown))}, which the model's forward "
                    f"does not take; its inputs are {', '.join(self._all) or 'none'}"
                )
            return inputs
        return self.bind([inputs] if isinstance(inputs, Tensor) else inputs, {})

    def name_all(self, batches: Inputs | GetBatch) -> Mapping[str, Any] | GetBatch:
        """Name the inputs of a batch, or of each batch that a given function returns."""
        if callable(batches):
            make = batches
            return lambda *args: self.name(make(*args))
        return self.name(batches)

    def bind(self, by_place: Sequence[Any], by_name: Mapping[str, Any]) -> dict[str, Any]:
        """Return positional and keyword arguments of a call as one mapping by parameter name."""
        if len(by_place) > len(self.names):
            raise TypeError(
                f"{len(by_place)} inputs by position, but the model's forward takes "
                f"{len(self.names)} ({', '.join(self.names) or 'none'}): pass a dict of inputs by "
                "name"
            )
        placed = dict(zip(self.names, by_place, strict=False))
        twice = placed.keys() & by_name
        if twice:
            raise TypeError(f"input {min(twice)!r} is passed both by position and by name")
        return placed | dict(by_name)

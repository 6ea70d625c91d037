"""fp32, bf16, fp16: which tensors of a stage are in half precision, and the fp32 masters of those.

micro-batch:  half weights ─► half gradients ─► added up in the masters' fp32 `.grad`
optimizer:    updates the masters, which are all that `parameters()` gives
next step:    masters ─► half weights

Batch norm keeps its parameters and statistics in fp32, as torch's kernels for half inputs take
them: averages over many batches are lost in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from varuna_core.split_values import map_leaves

TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What a user asked for."""

    name: str

    @property
    def half(self) -> torch.dtype | None:
        """None: the model's own types."""
        return TYPES[self.name]

    def choose_types(self, model: nn.Module) -> dict[int, torch.dtype]:
        """The types of parameters and buffers, by their ids, where they are not the model's own."""
        if self.half is None:
            return {}
        full, half = set(), {}
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or tensor.dtype not in FLOATS:
                    continue
                if isinstance(module, _BatchNorm):
                    full.add(id(tensor))
                half[id(tensor)] = self.half
        return half | dict.fromkeys(full, torch.float32)

    def cast(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch with its fractions in half precision, as the weights that they will meet."""
        half = self.half

        def cast_one(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.dtype in FLOATS
            return leaf.to(half) if floating and half is not None else leaf

        return dict(map_leaves(cast_one, dict(inputs)))


def choose_precision(fp16: bool, precision: str | None) -> Precision:
    """From Varuna's arguments, the ancestor's spelling and ours."""
    if precision is not None and precision not in TYPES:
        raise ValueError(f"precision {precision!r}: this version knows {', '.join(TYPES)}")
    if fp16 and precision not in (None, "fp16"):
        raise ValueError(f"fp16=True and precision {precision!r}: say one of them")
    return Precision(name="fp16" if fp16 else precision or "fp32")


class Masters:
    """What an optimizer updates: fp32 copies of a stage's parameters, or these themselves."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]
    ) -> None:
        """`values` are fp32; what has none (all in fp32, else what is frozen) is its own."""
        made: dict[int, nn.Parameter] = {}
        self.by_name: dict[str, nn.Parameter] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in parameters.items():
            if id(parameter) not in made:
                master = parameter
                if name in values:
                    master = nn.Parameter(values[name])
                    self._pairs.append((parameter, master))
                made[id(parameter)] = master
            self.by_name[name] = made[id(parameter)]
        self._of, self._parameters = made, [*{id(p): p for p in parameters.values()}.values()]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of one of the stage's parameters."""
        return self._of[id(parameter)]

    def list_pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter of the stage once, and its master."""
        return [(parameter, self.of(parameter)) for parameter in self._parameters]

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the weights of the masters, whoever changed these."""
        if not self._pairs:
            return
        for parameter, master in self._pairs:
            if parameter.requires_grad != master.requires_grad:
                parameter.requires_grad_(master.requires_grad)
        torch._foreach_copy_([p for p, _ in self._pairs], [m for _, m in self._pairs])

    @torch.no_grad()
    def take_gradient(self, parameter: nn.Parameter, factor: float) -> nn.Parameter:
        """Add the gradient that the parameter just got, times `factor`, to its master's."""
        master = self.of(parameter)
        gradient = parameter.grad
        if master is not parameter and gradient is not None:
            if master.grad is None:
                master.grad = gradient.to(master.dtype, copy=True).mul_(factor)
            else:
                master.grad.add_(gradient, alpha=factor)
            parameter.grad = None
        return master

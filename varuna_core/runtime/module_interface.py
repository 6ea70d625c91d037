"""Varuna as a module: its parameters and buffers are this rank's, under the plain model's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from varuna_core.runtime.engine.rank_part import RankPart
from varuna_core.runtime.optim.grads import Gradients
from varuna_core.runtime.optim.precision import Masters
from varuna_core.runtime.split.split import Split

P = TypeVar("P", bound="OwnPart")


class OwnPart(nn.Module):
    """What torch's optimizers and users ask a module for."""

    split: Split
    part: RankPart
    gradients: Gradients
    _masters: Masters
    _nothing: nn.Parameter

    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, in fp32, under each of its names in the plain model; the
        weights follow at the start of the next step. With ZeRO those that this rank owns."""
        return dict(self._masters.by_name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The masters; a rank without any has one of no elements, which optimizers want."""
        dot = prefix + "." if prefix else ""
        named = list(self._masters.by_name.items())
        if remove_duplicate:
            named = [*{id(p): (name, p) for name, p in reversed(named)}.values()][::-1]
        for name, parameter in named or [("nothing", self._nothing)]:
            yield dot + name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        dot = prefix + "." if prefix else ""
        for name, buffer in self.part.buffers().items():
            yield dot + name, buffer

    def state_dict(  # type: ignore[override]  # a part of the model has no prefix, no destination
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """This rank's masters and persistent buffers, in the plain model's names."""
        if args or kwargs:
            raise TypeError("Varuna.state_dict takes no arguments: it holds this rank's part")
        if self._masters.slices:
            raise NotImplementedError(
                "with zero=3 the weights lie in slices: save with checkpoint() and take one file "
                "from it with python -m varuna_core.checkpoint export"
            )
        persistent = self.split.model.state_dict().keys()
        named = {**self._masters.by_name, **self.part.buffers()}
        return {name: tensor.detach() for name, tensor in named.items() if name in persistent}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("give Varuna(state_dict=...) the plain model's state dict")

    def train(self: P, mode: bool = True) -> P:
        self.training = mode
        self.part.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradients.zero(set_to_none)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Varuna runs whole batches: call step(inputs) or evaluate(inputs)")

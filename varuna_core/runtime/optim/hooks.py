"""Run the user's hooks on parameters once a step, on the gradient of the global batch.

In the plain model, hooks of a parameter see one gradient per backward. Under Varuna, gradients
arrive for each micro-batch and replica, scaled, and in half precision for parameters other than the
user's. So hooks are disabled during backwards and run on the reduced gradients: those on the given
model's parameters (registered before Varuna was created) and on Varuna's own, the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.runtime.optim.precision import Masters

Hooks = dict[int, Callable[..., Any]]
"""Hooks of a parameter, keyed by the id of their handle; removing a handle deletes its entry."""


class ParameterHooks:
    def __init__(
        self, masters: Masters, model: nn.Module | None = None, parts: Collection[str] = ()
    ) -> None:
        """`model` is the given model; for parameters in `parts`, this rank holds only part of the
        gradient."""
        self.masters = masters
        self._names = {id(master): name for name, master in reversed(masters.by_name.items())}
        self._given: dict[int, list[tuple[Hooks, Hooks]]] = {}
        self._resting: list[tuple[Hooks, Hooks]] = []
        self._ours: Callable[..., Any] | None = None
        self._hooked: list[tuple[nn.Parameter, nn.Parameter]] = []
        named = [] if model is None else model.named_parameters(remove_duplicate=False)
        places = {id(master): place for place, master in masters.pairs}
        for name, original in named:
            before, after = read_hooks(original)
            master = masters.by_name.get(name)
            if master is None or not (before or after):
                continue
            if name in parts:
                raise ValueError(
                    f"parameter {name!r} has a hook, but this rank gets only part of its gradient "
                    "(zero=3, or a sharded layer): put the hook on Varuna's own parameter if a "
                    "part is enough, or use zero=2, or do not shard the layer"
                )
            if after and places.get(id(master), master) is not master:
                self._refuse_offload(name)
            held = self._given.setdefault(id(master), [])
            if all(other is not before for other, _ in held):
                held.append((before, after))

    def rest(self, ours: Callable[..., Any]) -> None:
        """Disable all hooks except `ours` during the backwards of a step, until `wake`."""
        self.wake()
        self._hooked, self._ours = [], ours
        for place, master in self.masters.pairs:
            before, after = read_hooks(master)
            if not before and not after and id(master) not in self._given:
                continue
            self._hooked.append((place, master))
            if place is not master:
                if after:
                    self._refuse_offload(self._names[id(master)])
                continue
            for hooks in (before, after):
                users = {number: hook for number, hook in hooks.items() if hook != ours}
                for number in users:
                    del hooks[number]
                if users:
                    self._resting.append((hooks, users))

    def wake(self) -> None:
        """Restore all hooks as the user set them."""
        for hooks, users in self._resting:
            hooks.update(users)
        self._resting = []

    @torch.no_grad()
    def run_before(self) -> None:
        """Run hooks on gradients, which they may replace, before earlier gradients are added."""
        for place, master in self._hooked:
            for hooks, _ in self._list(master):
                for hook in [*hooks.values()]:
                    if place.grad is not None:
                        made = hook(place.grad)
                        if made is not None:
                            place.grad = check_gradient(made, place, self._names[id(master)])

    def list_fresh(self) -> list[nn.Parameter]:
        """Return the hooked parameters that got a gradient in this step."""
        return [master for place, master in self._hooked if place.grad is not None]

    @torch.no_grad()
    def run_after(self, fresh: Iterable[nn.Parameter]) -> None:
        """Run post-accumulate hooks of parameters whose gradient is complete."""
        for master in fresh:
            for _, hooks in self._list(master):
                for hook in [*hooks.values()]:
                    if hook != self._ours:
                        hook(master)

    def _list(self, master: Tensor) -> Iterator[tuple[Hooks, Hooks]]:
        yield from self._given.get(id(master), ())
        yield read_hooks(master)

    def _refuse_offload(self, name: str) -> None:
        raise ValueError(
            f"parameter {name!r} has a post_accumulate_grad hook, which reads .grad, but with "
            "offload the gradient reaches the host only at the end of the step: use "
            "register_hook, which is given the gradient, or turn offload off"
        )


def read_hooks(parameter: Tensor) -> tuple[Hooks, Hooks]:
    """Return the hooks on the gradient, and the post-accumulate hooks (torch 2.13)."""
    before: Any = parameter._backward_hooks
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return ({} if before is None else before), ({} if after is None else after)


def check_gradient(made: Tensor, place: Tensor, name: str) -> Tensor:
    if made.shape != place.shape:
        raise RuntimeError(
            f"a hook on parameter {name!r} returned a gradient of shape {list(made.shape)}, "
            f"expected {list(place.shape)}"
        )
    return made.to(place.device, place.dtype)


def list_parts(slices: Mapping[str, Any], placed: Mapping[str, Any]) -> set[str]:
    """Return the names of parameters of which a rank holds only a part (slices or shards)."""
    shared = {name for name, sharing in placed.items() if not sharing.placement.is_replicate()}
    return {*slices, *shared}

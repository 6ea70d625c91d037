"""A stage's own weights: from the model, from a state dict, or initialised by name.

A model larger than memory is built with its parameters on the meta device (`parameters_on_meta`);
a stage then fills in its own alone. Initialised weights depend on the seed and the parameter's
name, not on the layout: before each one, torch is seeded with the first eight bytes, big-endian and
without the top bit, of SHA-256 of "<seed>/<name>", the name being the first of a tied parameter's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.cut import SplitError

Init = Callable[[str, Tensor], None]
"""Fills the tensor of this name in place, drawing from torch's default generator."""


def derive_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built within have parameters without memory; their buffers are real."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where values come from: the state dict first, then the seed, then the model itself."""

    model: nn.Module
    state_dict: Mapping[str, Tensor] | None = None
    seed: int | None = None
    init: Init | None = None

    def make(self, names: tuple[str, ...], original: Tensor) -> Tensor:
        """Values for the tensor of these names (the first leads), on the CPU."""
        if self.state_dict is not None:
            for name in names:
                if name in self.state_dict:
                    return self._fit(name, self.state_dict[name], original)
        if self.seed is not None and (original.is_meta or isinstance(original, nn.Parameter)):
            return self._initialise(names[0], original)
        if original.is_meta:
            raise SplitError(
                f"{names[0]!r} is on the meta device and has no values: "
                "give a state_dict that has it, or a seed"
            )
        return original.detach().clone()

    def _fit(self, name: str, value: Tensor, original: Tensor) -> Tensor:
        if value.shape != original.shape:
            raise SplitError(
                f"{name!r} is {list(value.shape)} in the state dict, {list(original.shape)} in "
                "the model"
            )
        return value.detach().to(dtype=original.dtype, copy=True)

    def _initialise(self, name: str, original: Tensor) -> Tensor:
        assert self.seed is not None
        made = torch.zeros(original.shape, dtype=original.dtype)
        if made.is_floating_point():
            made.fill_(float("nan"))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(derive_seed(self.seed, name))
            if self.init is not None:
                self.init(name, made)
            else:
                self._reset(name, made)
        if made.is_floating_point() and bool(made.isnan().any()):
            raise SplitError(
                f"no rule fills {name!r}: give init=f, where f(name, tensor) fills it in place"
            )
        return made

    def _reset(self, name: str, made: Tensor) -> None:
        """As the module that owns it would, in a copy whose other tensors are thrown away."""
        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        reset: Any = getattr(type(module), "reset_parameters", None)
        if reset is None:
            return
        twin = module.__new__(type(module))
        # No children: a module that fills those too has no rule of its own for this tensor.
        twin.__dict__.update(module.__dict__, _modules={})
        twin.__dict__["_parameters"] = {
            key: p if p is None else nn.Parameter(torch.zeros_like(p, device="cpu"))
            for key, p in module._parameters.items()
        }
        twin.__dict__["_buffers"] = {
            key: b if b is None else torch.zeros_like(b, device="cpu")
            for key, b in module._buffers.items()
        }
        if own in twin._parameters:
            twin._parameters[own] = nn.Parameter(made)
        else:
            twin._buffers[own] = made
        try:
            reset(twin)
        except AttributeError:
            return

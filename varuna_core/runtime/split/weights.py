"""Provide a stage's weights: from the model, from a state dict, or initialized by name.

A model larger than memory is built with its parameters on the meta device (`parameters_on_meta`); a
stage then materializes only its own parameters, one at a time. Initial weights depend on the seed
and the parameter's name, not on the layout: before each one, torch is seeded with the first eight
bytes (big-endian, without the top bit) of SHA-256 of "<seed>/<name>", with the first name of a tied
parameter. Then the model's own rules fill it, while all others are on the meta device:

1. `reset_parameters()` (or `_reset_parameters()`) of the module that owns the parameter, then of
   each enclosing module that has such a method, as constructors do;
2. `_init_weights(module)` of the outermost module that has this method, for the same modules in the
   same order, as `self.apply(self._init_weights)` does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.random_streams import derive_seed
from varuna_core.runtime.split.record import list_results, tensor_names
from varuna_core.runtime.split.stored import describe_misfit, match_model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules within the context with parameters on the meta device; buffers are real."""
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


class Weights:
    """Source of a stage's weights: the state dict, the seed, or the model itself."""

    def __init__(
        self,
        *,
        model: nn.Module,
        state_dict: Mapping[str, Tensor] | None = None,
        seed: int | None = None,
        groups: Iterable[Sequence[str]] | None = None,
    ) -> None:
        """`groups` lists the names of each parameter if they differ from the ties in the model."""
        self.model, self.state_dict, self.seed = model, state_dict, seed
        groups = tensor_names(model).values() if groups is None else groups
        self._stored = {} if state_dict is None else match_model(model, groups, state_dict)
        self._skeleton: nn.Module | None = None

    def make(self, names: tuple[str, ...], original: Tensor) -> Tensor:
        """Return CPU values for the tensor of these names, the first of which seeds them."""
        if self.state_dict is not None:
            for name in names:
                if name in self._stored:
                    stored = self._stored[name]
                    return self._fit(stored, self.state_dict[stored], original)
        if self.seed is not None and (original.is_meta or isinstance(original, nn.Parameter)):
            return self._initialise(names, original)
        if original.is_meta:
            raise SplitError(
                f"{names[0]!r} is on the meta device and has no values: "
                "pass a state_dict that contains it, or a seed"
            )
        return original.detach().clone()

    def _fit(self, name: str, value: Tensor, original: Tensor) -> Tensor:
        if value.shape != original.shape:
            raise SplitError(describe_misfit(name, value.shape, original.shape))
        return value.detach().to(dtype=original.dtype, copy=True)

    def _initialise(self, names: tuple[str, ...], original: Tensor) -> Tensor:
        assert self.seed is not None
        empty = torch.empty(original.shape, dtype=original.dtype)
        # Whole numbers have no NaN that says "not filled": they are filled over two backgrounds.
        grounds = [float("nan")] if empty.dtype.is_floating_point or empty.is_complex() else [0, 1]
        made = [
            self._fill(names, empty.fill_(ground) if i == 0 else torch.full_like(empty, ground))
            for i, ground in enumerate(grounds)
        ]
        if any(bool((other != made[0]).any()) for other in made):  # NaN differs from itself
            raise SplitError(
                f"no rule of the model initializes {names[0]!r}: give its module a "
                "reset_parameters(), or pass a state_dict that contains it"
            )
        return made[0]

    def _fill(self, names: tuple[str, ...], made: Tensor) -> Tensor:
        assert self.seed is not None
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(derive_seed(self.seed, names[0]))
            self._apply_rules(names, made)
        return made

    def _apply_rules(self, names: tuple[str, ...], made: Tensor) -> None:
        """Fill the tensor by the model's rules; all its other tensors are on the meta device."""
        if self._skeleton is None:
            self._skeleton = copy_to_meta(self.model)
        slots = [find_slot(self._skeleton, name) for name in names]
        before = [tensors[own] for tensors, own in slots]
        for (tensors, own), old in zip(slots, before, strict=True):
            tensors[own] = nn.Parameter(made, False) if isinstance(old, nn.Parameter) else made
        try:
            for path, rule in list_rules(self._skeleton, names[0]):
                try:
                    rule()
                except Exception as error:
                    raise SplitError(
                        f"the rule of {path or 'the model'!r} that initializes {names[0]!r} fails "
                        f"with all other tensors on the meta device ({type(error).__name__}: "
                        f"{error}): let it fill only its own tensors, or pass a state_dict"
                    ) from error
        finally:
            for (tensors, own), old in zip(slots, before, strict=True):
                tensors[own] = old


def copy_to_meta(model: nn.Module) -> nn.Module:
    replaced: dict[int, object] = {}
    for parameter in model.parameters():
        replaced[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), False)
    for buffer in model.buffers():
        replaced[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, {**list_results(model), **replaced})


def find_slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the module's dict that holds a parameter or a buffer, and the key in this dict."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    slots: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
    return slots, own


def list_rules(model: nn.Module, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the rules that fill a tensor, in order, each with its module."""
    above = [""]
    for word in name.split(".")[:-1]:
        above.append(f"{above[-1]}.{word}".lstrip("."))
    modules = [(path, model.get_submodule(path)) for path in reversed(above)]
    for path, module in modules:
        for word in ("reset_parameters", "_reset_parameters"):
            rule = getattr(module, word, None)
            if callable(rule) and takes(rule):
                yield path, rule
                break
    for path, module in reversed(modules):
        rule = getattr(module, "_init_weights", None)
        if callable(rule) and takes(rule, module):
            for _, each in modules:
                yield path, partial(rule, each)
            break


def takes(rule: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(rule).bind(*args)
    except TypeError:
        return False
    return True

"""Poison check: before training, detect values that reach a stage without passing through its cut.

The stage runs with its stubs' results filled with zeros, with NaN, and with noise. If outputs
differ, they depend on a stub, so a value bypassed the cut. The value's source is found by bisecting
the poisoned stubs, its use by watching for the first NaN after the cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varuna_core.runtime.comm.values import (
    Crossing,
    TensorSpec,
    describe,
    is_inexact,
    tensors_of,
)
from varuna_core.runtime.split.attributes import kept_attributes
from varuna_core.runtime.split.cut import LeakError, SplitError, StageEnd
from varuna_core.runtime.split.random_streams import kept_random_state, seed_all
from varuna_core.runtime.split.stage import Make, Stage

log = logging.getLogger(__name__)
MOST_NAMED = 8
"""Maximum number of sources of bypassing values that an error names."""
SEED = 0


Poison = Callable[[Tensor], Tensor]


def fill_nan(tensor: Tensor) -> Tensor:
    return tensor.fill_(float("nan") if is_inexact(tensor.dtype) else 1)


def fill_noise(tensor: Tensor) -> Tensor:
    """Fill with noise: it reveals uses that a maximum over NaNs hides; integers stay valid."""
    if not is_inexact(tensor.dtype):
        return tensor.zero_()
    draw = torch.Generator().manual_seed(SEED)
    noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float32)
    return tensor.copy_(noise)


class PoisonCheck:
    """Runs one stage with poisoned stubs."""

    def __init__(self, stage: Stage, inputs: Mapping[str, Any]) -> None:
        self.stage, self.inputs = stage, inputs
        self.poison: Poison = fill_nan
        self.wavers = False
        """True if the device adds in a varying order, so that two unpoisoned runs differ."""

    def run(self) -> None:
        """Raise LeakError if a value bypasses the stage's first cut."""
        stage = self.stage
        if stage.segments.start == 0 or not stage.segments:
            return
        sources = [*stage.stubs, *stage.early]
        try:
            clean = self._forward(())
            self.wavers = differ(clean, self._forward(()))
        except SplitError:
            raise
        except Exception as error:  # the values that enter the stage here are made up
            log.warning("stage %d: not checked for leaks: %s", stage.index, error)
            return
        if any(is_inexact(t.dtype) and bool(t.isnan().any()) for t in clean):
            log.warning(
                "stage %d: not fully checked for leaks: its outputs for test values are NaN",
                stage.index,
            )
        if self._leaks(sources, clean):
            raise LeakError(self._explain(sources, clean))

    def _leaks(self, sources: Sequence[str], clean: list[Tensor]) -> bool:
        failures = []
        for self.poison in (fill_nan, fill_noise):
            try:
                if differ(clean, self._forward(sources), self.wavers):
                    return True
            except Exception as error:  # code before the stage may trip over poison
                failures.append(error)
        if len(failures) == 2:
            log.warning("stage %d: not checked for leaks: %s", self.stage.index, failures[0])
        return False

    def _forward(self, poisoned: Collection[str]) -> list[Tensor]:
        stage = self.stage
        received = [self._enter(spec) for spec in stage.record.cuts[stage.segments.start - 1].specs]
        versions = [tensor._version for tensor in received]
        restore = [
            (parameter, parameter.data) for n, parameter in stage.early.items() if n in poisoned
        ]
        for parameter, data in restore:
            parameter.data = self.poison(torch.empty_like(data))

        def at_start() -> None:
            for parameter, data in restore:
                parameter.data = data

        stage.at_start = at_start
        try:
            with (
                torch.no_grad(),
                kept_buffers(stage.module),  # each run begins with the same ones
                kept_attributes(stage.module),
                kept_random_state(stage.device),
                stage.loaded(self.inputs, lambda name: self._maker(name in poisoned)),
            ):
                seed_all(SEED)
                out = stage.forward(self.inputs, received)
        finally:
            stage.at_start = None
            at_start()
        pairs = zip(received, versions, strict=True)
        stage.copied |= {i for i, (t, version) in enumerate(pairs) if t._version != version}
        tensors = tensors_of(out.tensors if isinstance(out, Crossing) else out)
        if any(type(tensor).__name__ == "FakeTensor" for tensor in tensors):
            raise SplitError(
                f"stage {stage.index} uses a tensor without values, which the dry run left in a "
                "cache outside the model: create the tensor in each forward, or store it in a "
                "module"
            )
        return tensors

    def _enter(self, spec: TensorSpec) -> Tensor:
        """Return reproducible values for a cut, positive as roots and logarithms require."""
        made = torch.zeros(spec.shape, dtype=spec.dtype)
        if spec.dtype == torch.bool:
            made.fill_(True)
        elif spec.dtype.is_floating_point:
            made.uniform_(0.1, 1, generator=torch.Generator().manual_seed(SEED))
        return made.to(self.stage.device)

    def _maker(self, poisoned: bool) -> Make:
        def make(spec: TensorSpec) -> Tensor:
            made = torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=self.stage.device
            )
            return self.poison(made) if poisoned else made.zero_()

        return make

    def _explain(self, sources: Sequence[str], clean: list[Tensor]) -> str:
        left, makers = list(sources), list[str]()
        while len(makers) < MOST_NAMED and (not makers or (left and self._leaks(left, clean))):
            suspects = left
            while len(suspects) > 1:
                half = suspects[: len(suspects) // 2]
                suspects = half if self._leaks(half, clean) else suspects[len(half) :]
            makers += suspects
            left.remove(suspects[0])
        maker, *others = makers
        what, user = self._find_use(maker)
        also = f"; so are values made by {', '.join(map(repr, others))}" if others else ""
        stage = self.stage
        cut = stage.name_cut(stage.segments.start - 1)
        kind = "parameter" if maker in stage.early else "module"
        made = f"{kind} {maker!r}" + (" (read there)" if kind == "parameter" else "")
        return (
            f"{what} made before {cut} by {made} is used after it, in stage {stage.index}, by "
            f"{user}, without passing the cut{also}: pass it through every CutPoint between the "
            f"two (x, y = cut(x, y); a cut of `cut_before` takes the module's first argument and "
            f"those that `carry` names: for others write a CutPoint into the forward), or choose a "
            f"partition that has no stage boundary there"
        )

    def _find_use(self, maker: str) -> tuple[str, str]:
        watcher, self.poison = _NanWatch(self.stage), fill_nan
        with watcher, open_modules(self.stage.module, watcher.open):
            try:
                self._forward([maker])
            except Exception:
                log.debug("stage %d: poisoned run failed", self.stage.index, exc_info=True)
        return watcher.found or ("a value", "the model")


class _NanWatch(TorchFunctionMode):
    """Raises at the first function after the stage's start that gets a NaN."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.found: tuple[str, str] | None = None
        self.open: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None and self.stage.is_live:
            for tensor in tensors_of((args, kwargs)):
                if is_inexact(tensor.dtype) and bool(tensor.isnan().any()):
                    name = self.open[-1] if self.open else ""
                    user = f"module {name!r}" if name else "the model's own forward"
                    word = getattr(func, "__name__", str(func))
                    self.found = (
                        f"a {describe(tensor.dtype, tensor.shape)}",
                        user if word == "__get__" else f"{user} ({word})",
                    )
                    raise StageEnd
        return func(*args, **(kwargs or {}))


def differ(clean: Sequence[Tensor], poisoned: Sequence[Tensor], wavers: bool = False) -> bool:
    """Return True if the outputs differ by more than rounding, or with `wavers`, for a model whose
    own results vary, by more than 1 %."""
    if len(clean) != len(poisoned):
        return True
    for a, b in zip(clean, poisoned, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if not is_inexact(a.dtype):
            if not torch.equal(a, b):
                return True
            continue
        rounding = 1e-2 if wavers else 8 * torch.finfo(a.dtype).eps
        if not torch.allclose(a, b, rtol=rounding, atol=rounding / 10, equal_nan=True):
            return True
    return False


def _append(names: list[str], name: str, module: nn.Module, args: Any) -> None:
    names.append(name)


@contextmanager
def open_modules(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Maintain `names` as the stack of the modules that are running."""
    hooks: list[Any] = []

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        names.pop()

    for name, module in model.named_modules():
        enter = partial(_append, names, name)
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers at the end of the context: the same tensors with the same values."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in kept:
            module._buffers[name] = buffer
            if not torch.equal(as_strided(buffer), as_strided(values)):
                buffer.copy_(values)


def as_strided(tensor: Tensor) -> Tensor:
    """Return a strided form of a sparse tensor, since `torch.equal` supports no sparse ones."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()

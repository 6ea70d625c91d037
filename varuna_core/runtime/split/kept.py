"""Keep modules in fp32 in a half-precision model.

    half ─► cast to fp32 ─► the module, its parameters and buffers in fp32 ─► cast to half

torch's kernels treat batch norm in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.runtime.comm.values import map_leaves

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class KeptModules:
    """Names of the modules that stay in fp32, and the dtype of all others."""

    names: tuple[str, ...] = ()
    """Names of the outermost modules; nothing is converted inside them."""

    half: torch.dtype | None = None

    def install(self, model: nn.Module) -> None:
        """Register hooks on these modules in `model`, a copy of the user's: half-precision inputs
        are converted to fp32 after the user's hooks, and fp32 outputs to `half` before them."""
        for name in self.names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(widen, with_kwargs=True)
            module.register_forward_hook(partial(narrow, self.half), prepend=True)


NOTHING_KEPT = KeptModules()


def widen(module: nn.Module, args: tuple[Any, ...], by_name: Mapping[str, Any]) -> Any:
    def convert(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf

    return map_leaves(convert, (args, by_name))


def narrow(half: torch.dtype | None, module: nn.Module, args: Any, output: Any) -> Any:
    def convert(leaf: Any) -> Any:
        is_full = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
        return leaf.to(half) if is_full else leaf

    return map_leaves(convert, output)

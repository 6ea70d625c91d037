"""What ranks import: torch, the parts of it that it loads at their first use, and varuna_core."""

from __future__ import annotations

import importlib
import pkgutil

import varuna_core

LATE = (
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch._meta_registrations",
    "torch._decomp.decompositions",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.flop_counter",
)


def load() -> None:
    for name in ("torch", *LATE):
        importlib.import_module(name)
    for module in pkgutil.iter_modules(varuna_core.__path__, "varuna_core."):
        importlib.import_module(module.name)
    for name in ("gpt", "bert", "training"):
        importlib.import_module(f"varuna_core.programs.{name}")

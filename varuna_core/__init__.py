"""The training runtime, and the torch-free records and node agent that every part of vjob shares.

Importing this package imports no other module, because the node agent and bare containers rely on
it. The public names are loaded lazily, on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varuna_core import trace as trace
    from varuna_core.checkpoint.foreign.weight_files import open_weights as open_weights
    from varuna_core.data.place import DataPlace as DataPlace
    from varuna_core.profiling.profiler import Profiler as Profiler
    from varuna_core.runtime.arguments import Options as Options
    from varuna_core.runtime.cross_entropy import cross_entropy as cross_entropy
    from varuna_core.runtime.saving import leaving as leaving
    from varuna_core.runtime.split.cut import CutPoint as CutPoint
    from varuna_core.runtime.split.cut import cut_before as cut_before
    from varuna_core.runtime.split.loss import TokenMean as TokenMean
    from varuna_core.runtime.split.weights import parameters_on_meta as parameters_on_meta
    from varuna_core.runtime.split.wrappers import with_loss as with_loss
    from varuna_core.varuna import Varuna as Varuna

__version__ = "0.1.0"
_LAZY = {
    "CutPoint": "varuna_core.runtime.split.cut",
    "DataPlace": "varuna_core.data.place",
    "Options": "varuna_core.runtime.arguments",
    "Profiler": "varuna_core.profiling.profiler",
    "TokenMean": "varuna_core.runtime.split.loss",
    "Varuna": "varuna_core.varuna",
    "cross_entropy": "varuna_core.runtime.cross_entropy",
    "cut_before": "varuna_core.runtime.split.cut",
    "open_weights": "varuna_core.checkpoint.foreign.weight_files",
    "parameters_on_meta": "varuna_core.runtime.split.weights",
    "with_loss": "varuna_core.runtime.split.wrappers",
}
_MODULES = {"leaving": "varuna_core.runtime.saving.leaving", "trace": "varuna_core.trace"}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

"""Keep torch's compiler out of a rank that compiles nothing: `spare_dynamo`.

torch (2.9 to 2.13) imports torch._dynamo, hundreds of modules that take nearly as long as torch
itself, for little: initial weights on the meta device and an optimizer ask it not to compile them,
and fake tensors read three settings. Stand-in modules answer these until any other attribute is
used; then the real modules are imported in their place. This is for the built-in programs only,
since a user's script may compile.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"
CONFIG = f"{NAME}.config"


class _Absent(ModuleType):
    """Stand-in for a module; the first use of an attribute that it lacks imports the module."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name, "A stand-in of vjob: varuna_core/programs/dynamo.py")
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # inspect asks every module for its file
        for module in (NAME, CONFIG):
            if isinstance(sys.modules.get(module), _Absent):
                del sys.modules[module]
        return getattr(importlib.import_module(self.__name__), name)


def spare_dynamo() -> None:
    """Install stand-ins for torch._dynamo and its config, unless torch._dynamo is imported."""
    if NAME in sys.modules:
        return
    config = _Absent(
        CONFIG,
        fake_tensor_cache_enabled=True,
        fake_tensor_cache_crosscheck_enabled=False,
        _custom_ops_profile=None,
    )
    sys.modules[CONFIG] = config
    sys.modules[NAME] = _Absent(
        NAME,
        config=config,
        disable=_disable,
        graph_break=_pass,
        # init_process_group empties its cache, if there is one.
        trace_rules=SimpleNamespace(clear_lru_cache=_pass),
    )


def _disable(function: Any = None, *ignored: Any, **options: Any) -> Any:
    return (lambda given: given) if function is None else function


def _pass(*ignored: Any, **options: Any) -> None:
    pass

"""Call a function with a module as soon as any code has imported the module.

    watch({"megatron.core.pipeline_parallel.schedules": wrap_schedules})

An error in the function is reported once, in one line, and the module is used as it is, since the
training must not be affected.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

log = logging.getLogger(__name__)

Apply = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: Mapping[str, Apply]) -> None:
        self.wanted = dict(wanted)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        apply = self.wanted.pop(fullname, None)
        if apply is None:
            return None
        spec = importlib.util.find_spec(fullname)  # by the finders after this one
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            apply_to(module, apply)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:  # a loader that is not written in Python
            log.info("no timeline of %s, which is loaded by %r", fullname, loader)
        return spec


def apply_to(module: ModuleType, apply: Apply) -> None:
    """Apply a function to a module; report an exception instead of raising it."""
    try:
        apply(module)
    except Exception as error:  # whatever an engine of another release has made of its names
        print(
            f"varuna_core.trace: no timeline of {module.__name__}: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


def watch(wanted: Mapping[str, Apply]) -> None:
    """Apply each function to its module now if it is imported already, else after its import."""
    later = {}
    for name, apply in wanted.items():
        module = sys.modules.get(name)
        if module is None:
            later[name] = apply
        else:
            apply_to(module, apply)
    if later:
        sys.meta_path.insert(0, _Finder(later))

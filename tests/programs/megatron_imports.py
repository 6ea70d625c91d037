"""Imports of today's Megatron-LM where there is no Triton, or Python 3.11: import this before it.

Core 0.19 asks for Python 3.12 by `typing.override` alone, and modules of Triton kernels are
imported whatever is asked for. The CPU calls none of them.
"""

import importlib.machinery
import importlib.util
import sys
import types
import typing
import unittest.mock
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

if not hasattr(typing, "override"):
    typing.override = lambda function: function  # type: ignore[attr-defined]


class Kernels:
    """Finder and loader of modules that have every name and do nothing."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        is_kernel = ".ops." in name or name.endswith("batch_invariant_kernels")
        if name.startswith("megatron.core.") and is_kernel:
            return ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> unittest.mock.MagicMock:
        return unittest.mock.MagicMock(__path__=[])

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        pass


if importlib.util.find_spec("triton") is None:
    sys.meta_path.insert(0, Kernels)

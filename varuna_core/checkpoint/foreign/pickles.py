"""Read pickles of other programs without running their code.

Megatron-LM's files hold its arguments, with classes of its own, besides the weights, so that
`weights_only=True` refuses them. Here a class named in the file is never imported: its objects
become `StandIn` objects with the attributes in the file. Only tensors and plain values are real.
"""

from __future__ import annotations

import pickle
import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint

_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
}


class _Refused(Exception):
    """Raised for a name that is not allowed in a pickle."""


class StandIn:
    """Stand-in for an object whose class is not imported; `words` are constructor arguments."""

    named = ""
    words: tuple[Any, ...] = ()

    def __init__(self, *words: Any, **_: Any) -> None:
        self.words = words

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        elif isinstance(state, tuple):
            self.words = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    known: Sequence[str] | None = None
    """Packages and single names that the pickle may refer to; None allows any."""

    def find_class(self, module: str, name: str) -> Any:
        spelled = (module.partition(".")[0], f"{module}.{name}")
        if self.known is not None and not any(one in self.known for one in spelled):
            raise _Refused(f"unpickling it would run {module}.{name}, which is not allowed")
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type("StandIn", (StandIn,), {"named": f"{module}.{name}"})


TORN = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError),
    *(LookupError, OverflowError, MemoryError),
)
"""Exceptions that unpickling raises for corrupted data."""
_MODULE = types.ModuleType("pickles")
"""Module to pass to `torch.load(pickle_module=...)`."""
vars(_MODULE).update(Unpickler=_Unpickler, load=lambda file, **_: _Unpickler(file).load())


def load_torch_file(path: Path, part: IO[bytes] | None = None) -> dict[str, Any]:
    """Load a dict from a file of `torch.save`, or from a part of a file, where a list holds it."""
    try:
        found = torch.load(
            part or path, map_location="cpu", mmap=part is None, weights_only=False,
            pickle_module=_MODULE,
        )  # fmt: skip
        if part is not None:
            (found,) = found
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except (RuntimeError, *TORN) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DamagedCheckpoint(f"{path} is not a complete torch.save file: {first}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dict")
    return found


def load_plain_pickle(path: Path, known: Sequence[str]) -> Any:
    """Load a file of `pickle.dump`; `known` lists the packages and names that it may refer to."""
    try:
        with path.open("rb") as file:
            unpickler = _Unpickler(file)
            unpickler.known = known
            return unpickler.load()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except _Refused as error:
        raise CheckpointError(f"{path} is not read: {error}") from error
    except TORN as error:
        raise DamagedCheckpoint(f"{path} is not a complete pickle: {error}") from error

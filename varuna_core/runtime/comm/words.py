"""Serialize values that ranks exchange besides tensors as JSON; nothing is unpickled.

    spell(value) ─► bytes ─► another rank ─► read(bytes): the same value

Plain values stay unchanged. Other values become a list that begins with their kind. A class (named
tuple, enum, dataclass, a container of torch's pytree) is sent by name, and looked up only among
modules that the reader has imported: a name causes no import, and no other class is instantiated.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

PLAIN_TYPES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, tuple, set)}
"""Types that may be sent as values, such as the factory of a defaultdict."""


class Hole:
    """Placeholder for a tensor, which is sent separately."""


HOLE = Hole()


def spell(value: Any) -> bytes:
    return json.dumps(_encode(value), separators=(",", ":")).encode()


def read(text: bytes) -> Any:
    """Parse a value; raise ValueError for bytes that `spell` cannot have written."""
    try:
        return _decode(json.loads(text))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot parse a value from another rank: {error}") from error


def gather(mine: Any, group: Any) -> list[Any]:
    """Return the values of all ranks, on every rank of a group."""
    text = _to_tensor(spell(mine))
    size = torch.tensor([text.numel()])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [
        read(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)
    ]


def broadcast(value: Any, source: int, group: Any) -> Any:
    """Return the value of rank `source`, on every rank of a group."""
    is_source = dist.get_rank() == source
    text = _to_tensor(spell(value)) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, source, group=group)
    if not is_source:
        text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, source, group=group)
    return value if is_source else read(bytes(text.tolist()))


def _to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# One value.


def _encode(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, enum.Enum):
        return ["enum", _name(kind), value.name]
    if value is None or kind in (bool, str, int):
        return value
    if isinstance(value, (str, int)):  # of a kind of its own, such as torch's version
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["float", repr(float(value))]
    if isinstance(value, Hole):
        return ["hole"]
    if kind in (list, tuple, torch.Size):
        return [kind.__name__, [_encode(item) for item in value]]
    if kind is dict:
        return ["dict", [[_encode(key), _encode(item)] for key, item in value.items()]]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind is complex:
        return ["complex", _encode(value.real), _encode(value.imag)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), _encode(value.flatten().tolist())]
    if isinstance(value, type) and value in PLAIN_TYPES.values():
        return ["type", value.__name__]
    if hasattr(kind, "_fields") and isinstance(value, tuple):
        return ["named", _name(kind), [_encode(item) for item in value]]
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return ["node", _name(kind), [_encode(item) for item in children], _encode(context)]
    if is_dataclass(kind):
        held = [[field.name, _encode(getattr(value, field.name))] for field in fields(kind)]
        return ["made", _name(kind), held]
    raise TypeError(
        f"a {kind.__qualname__} cannot be sent to another rank: pass numbers, words, tensors, and "
        "tuples, lists, dicts and named tuples of them"
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    return _READERS[kind](*rest)


def _read_items(items: list[Any]) -> list[Any]:
    return [_decode(item) for item in items]


def _read_tensor(dtype: str, shape: list[int], values: Any) -> Tensor:
    return torch.tensor(_decode(values), dtype=_read_dtype(dtype)).reshape(shape)


def _read_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a torch dtype")
    return found


def _read_enum(name: str, word: str) -> Any:
    return _find(name, lambda kind: issubclass(kind, enum.Enum))[word]


def _read_named(name: str, items: list[Any]) -> Any:
    kind = _find(name, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return kind(*_read_items(items))


def _read_node(name: str, items: list[Any], context: Any) -> Any:
    kind = _find(name, lambda kind: kind in pytree.SUPPORTED_NODES)
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(_read_items(items), _decode(context))


def _read_made(name: str, held: list[Any]) -> Any:
    kind = _find(name, is_dataclass)
    return kind(**{field: _decode(item) for field, item in held})


_READERS: dict[str, Callable[..., Any]] = {
    "hole": lambda: HOLE,
    "float": float,
    "list": _read_items,
    "tuple": lambda items: tuple(_read_items(items)),
    "Size": lambda items: torch.Size(_read_items(items)),
    "dict": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
    "bytes": base64.b64decode,
    "complex": lambda real, imag: complex(_decode(real), _decode(imag)),
    "dtype": _read_dtype,
    "device": torch.device,
    "type": PLAIN_TYPES.__getitem__,
    "tensor": _read_tensor,
    "enum": _read_enum,
    "named": _read_named,
    "node": _read_node,
    "made": _read_made,
}


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in name:
        raise TypeError(
            f"a {kind.__qualname__} cannot be sent to another rank: define the class at the top of "
            "its file, not within a function"
        )
    return name


def _find(name: str, may_be: Callable[[type], bool]) -> Any:
    """Return an imported class by its name if `may_be` accepts it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not may_be(found):
        raise ValueError(f"{name} is not a class that may be sent between ranks")
    return found

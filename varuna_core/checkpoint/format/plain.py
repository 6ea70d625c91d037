"""Convert small state to JSON and back, without pickle.

JSON values are unchanged, and numpy's numbers become Python's. Tuples, bytes, dicts with keys other
than strings, Counters (some LR schedulers have them) and small tensors become an object with the
single key "!".
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.format.entries import DTYPES, name_dtype, view_bytes
from varuna_core.checkpoint.format.errors import DamagedCheckpoint

MAX_TENSOR_BYTES = 1 << 20
"""Tensors above this size must be stored in the tensor files."""


def to_plain(value: Any, path: str, place: Callable[[str, Tensor], str] | None = None) -> Any:
    """Convert a value to what JSON can hold. `path` names the value in errors. If `place` is given,
    it is called with each tensor, and the word that it returns is stored instead of the tensor."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Tensor):
        if place is not None:
            return {"!": ["placed", place(path, value)]}
        return {"!": ["tensor", *_render_tensor(value, path)]}
    if isinstance(value, bytes):
        return {"!": ["bytes", base64.b64encode(value).decode()]}
    if isinstance(value, (list, tuple)):
        if all(type(item) is int for item in value):  # a random state has hundreds
            return list(value) if isinstance(value, list) else {"!": ["tuple", list(value)]}
        items = [to_plain(item, f"{path}/{i}", place) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"!": ["tuple", items]}
    if isinstance(value, Mapping):
        pairs = [(key, to_plain(item, f"{path}/{key}", place)) for key, item in value.items()]
        if isinstance(value, Counter) or "!" in value or not all(type(k) is str for k, _ in pairs):
            word = "counter" if isinstance(value, Counter) else "dict"
            return {"!": [word, [[to_plain(k, path), item] for k, item in pairs]]}
        return dict(pairs)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy's
        return to_plain(value.item(), path)
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, "
        "strings, bytes and small tensors, in lists, tuples and dicts"
    )


def from_plain(value: Any, take: Callable[[str], Tensor] | None = None) -> Any:
    """Return the value that `to_plain` was given; `take` gives the tensor for a word of `place`."""
    if isinstance(value, list):
        return [from_plain(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    if "!" not in value:
        return {
            key: from_plain(item, take) if isinstance(item, (dict, list)) else item
            for key, item in value.items()
        }
    word, *rest = value["!"]
    if word == "tuple":
        return tuple(from_plain(item, take) for item in rest[0])
    if word in ("dict", "counter"):
        pairs = {from_plain(key): from_plain(item, take) for key, item in rest[0]}
        return Counter(pairs) if word == "counter" else pairs
    if word == "bytes":
        return base64.b64decode(rest[0])
    if word == "tensor":
        return _parse_tensor(*rest)
    if word == "placed" and take is not None:
        return take(rest[0])
    raise DamagedCheckpoint(f"a value has kind {word!r}, which this version does not know")


def _render_tensor(tensor: Tensor, path: str) -> tuple[str, list[int], str]:
    if tensor.numel() * tensor.element_size() > MAX_TENSOR_BYTES:
        raise TypeError(f"{path} is a tensor of {list(tensor.shape)}: too large for small state")
    held = tensor.detach().cpu().contiguous()
    data = base64.b64encode(view_bytes(held)).decode()
    return name_dtype(tensor.dtype, path), list(tensor.shape), data


def _parse_tensor(dtype: str, shape: list[int], data: str) -> Tensor:
    made = torch.empty(shape, dtype=DTYPES[dtype])
    try:
        if made.numel():
            view_bytes(made)[:] = base64.b64decode(data)
    except (ValueError, binascii.Error) as error:
        raise DamagedCheckpoint("a tensor of the small state is damaged") from error
    return made

"""Dry runs kept from an earlier start, in the user's cache folder.

A file holds one record as JSON under a key of everything that it depends on (`fingerprint`): the
model's code and values, the inputs' shapes, the device, versions, our own source. Where that cannot
be told, or the run looked at values, nothing is kept. Ranks that start together each read, or make
and replace, a whole file; one that is damaged is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import varuna_core
from varuna_core.runtime.comm.values import TensorSpec, spec_of
from varuna_core.runtime.split.fingerprint import Unknown, take_fingerprint
from varuna_core.runtime.split.record import Call, Cut, Record

log = logging.getLogger(__name__)
NUM_KEPT = 100
PLAIN = (bool, int, float, str, type(None))


class Unstorable(Exception):
    """The record holds something that JSON cannot."""


def find_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return home / "vjob" / "dry-runs"


def find_key(
    model: nn.Module,
    inputs: Mapping[str, Any],
    device: torch.device,
    types: Mapping[int, torch.dtype] = MappingProxyType({}),
) -> str | None:
    """What a record of this model and these inputs is kept under; None: it must not be kept."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    cast = [(name, str(types[id(t)])) for name, t in tensors if id(t) in types]
    shown = {
        name: spec_of(value) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    try:
        return take_fingerprint(model, shown, device.type, cast, digest_source())
    except Unknown as unknown:
        log.info("the dry run is not kept: the model holds %s", unknown)
        return None


@cache
def digest_source() -> str:
    """Of this package's own files: a version number does not change with each edit."""
    digest = hashlib.sha256()
    for path in sorted(Path(varuna_core.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_record(key: str) -> Record | None:
    """The record kept under this key, if it is there and whole."""
    try:
        stored = json.loads((find_cache_folder() / f"{key}.json").read_bytes())
        text = stored["record"]
        if stored["sha256"] != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("its digest differs")
        return decode_record(json.loads(text))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("the kept dry run %s cannot be used: %s", key, error)
        return None


def store_record(key: str, record: Record) -> None:
    """Keep it, if it can be; a full disk or a folder that may not be written is no failure."""
    if record.real:
        return
    folder = find_cache_folder()
    try:
        text = json.dumps(encode_record(record))
        whole = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "record": text})
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
            try:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, folder / f"{key}.json")
            except BaseException:
                os.unlink(file.name)
                raise
        _forget_oldest(folder)
    except (OSError, Unstorable) as error:
        log.info("the dry run is not kept: %s", error)


def _forget_oldest(folder: Path) -> None:
    """Ends of other processes' writes too, when they are old enough."""
    files = []
    for path in folder.iterdir():
        try:
            files.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # by another rank
            continue
    for _, path in sorted(files)[:-NUM_KEPT]:
        path.unlink(missing_ok=True)


# A record as JSON.


def encode_record(record: Record) -> Any:
    last = len(record.cuts)
    return {
        "calls": [
            [call.module, call.parent, call.begin, call.end, *_encode_output(call, last)]
            for call in record.calls
        ],
        "cuts": [[cut.name, [encode(spec) for spec in cut.specs]] for cut in record.cuts],
        "costs": record.costs,
        "uses": [
            [name, sorted(uses, key=lambda use: (use[0], -1 if use[1] is None else use[1]))]
            for name, uses in record.uses.items()
        ],
        "changes": [[name, sorted(segments)] for name, segments in record.changes.items()],
    }


def _encode_output(call: Call, last: int) -> tuple[Any, bool]:
    """No stub stands in for a call that ends in the last segment."""
    if call.opaque or call.end == last:
        return None, True
    return encode(call.output), False


def decode_record(stored: Any) -> Record:
    return Record(
        calls=[
            Call(
                module=name, parent=parent, begin=begin, end=end, output=decode(out), opaque=opaque
            )
            for name, parent, begin, end, out, opaque in stored["calls"]
        ],
        cuts=[Cut(name=name, specs=tuple(map(decode, specs))) for name, specs in stored["cuts"]],
        costs=stored["costs"],
        uses={name: {(segment, call) for segment, call in uses} for name, uses in stored["uses"]},
        changes={name: set(segments) for name, segments in stored["changes"]},
    )


def encode(value: Any) -> Any:
    """Containers as a word and their parts; plain values as they are."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, TensorSpec):
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", value.shape, value.stride, dtype, value.requires_grad]
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(encode, value)]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", *([key, encode(item)] for key, item in value.items())]
    raise Unstorable(f"a module returns a {type(value).__name__}")


def decode(stored: Any) -> Any:
    if not isinstance(stored, list):
        return stored
    word, *parts = stored
    if word == "tensor":
        shape, stride, dtype, requires_grad = parts
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"no type of a tensor: {dtype!r}")
        return TensorSpec(
            shape=tuple(shape), stride=tuple(stride), dtype=kind, requires_grad=requires_grad
        )
    if word == "dict":
        return {key: decode(item) for key, item in parts}
    if word not in ("tuple", "list"):
        raise ValueError(f"no container: {word!r}")
    items = [decode(item) for item in parts]
    return tuple(items) if word == "tuple" else items

"""Match stored tensors with the model's tensors by name, and check them before any is read.

    model                         stored                  reason
    transformer.wte.weight        wte.weight              saved from the model without its head
    layers.0.mlp.weight           model.layers.0.mlp...   saved from the model with its head
    lm_head.weight                -                       tied: its other name is stored
    x.LayerNorm.weight            x.LayerNorm.gamma       name in the first BERT files

At most one prefix is added to, or removed from, stored names. Tensors of the model that are missing
in the file or have another shape are reported by name; tensors found only in the file are ignored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from varuna_core.runtime.split.cut import SplitError

log = logging.getLogger(__name__)
OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
MANY = 5
"""Maximum number of names listed in a message."""


def match_names(groups: Iterable[Sequence[str]], stored: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each name of the model that is found in the file.

    `groups` lists each tensor's names, of which one suffices. Raise SplitError if two prefixes fit.
    """
    there = frozenset(stored)
    found: dict[str, str] = {}
    missing: list[Sequence[str]] = []
    for names in groups:
        exact = {name: own for name in names if (own := _find(name, there)) is not None}
        found.update(exact)
        if not exact:
            missing.append(names)
    if not missing:
        return found
    there -= set(found.values())  # each is of one tensor
    tails = _index_tails(there)
    votes = Counter(
        prefix
        for names in missing
        for prefix in {p for n in names for p in _explain(n, there, tails)}
    )
    best = votes.most_common(2)
    if len(best) == 2 and best[0][1] == best[1][1]:
        raise SplitError(
            f"the names of the state dict match the model's in two ways, {_describe(best[0][0])} "
            f"or {_describe(best[1][0])}: rename its keys"
        )
    if best:
        prefix = best[0][0]
        for names in missing:
            for name in names:
                own = _find(_apply(prefix, name), there)
                if own is not None:
                    found[name] = own
    return found


Prefix = tuple[str, str]
"""("put" before the stored names, or "taken" from them; the prefix with its trailing dot)."""


def _find(name: str | None, there: frozenset[str]) -> str | None:
    if name is None or name in there:
        return name
    for new, old in OLD.items():
        if name.endswith(new) and name.removesuffix(new) + old in there:
            return name.removesuffix(new) + old
    return None


def _list_heads(name: str) -> Iterator[tuple[str, str]]:
    """Yield each way to split a name into two parts after a dot."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1], name[at + 1 :]
        at = name.find(".", at + 1)


def _index_tails(there: Iterable[str]) -> Mapping[str, set[str]]:
    tails: dict[str, set[str]] = {}
    for name in there:
        for head, tail in _list_heads(name):
            tails.setdefault(tail, set()).add(head)
    return tails


def _explain(name: str, there: frozenset[str], tails: Mapping[str, set[str]]) -> Iterator[Prefix]:
    for head, tail in _list_heads(name):
        if _find(tail, there) is not None:
            yield "put", head
    for spelled in (name, *(name.removesuffix(n) + o for n, o in OLD.items() if name.endswith(n))):
        for head in tails.get(spelled, ()):
            yield "taken", head


def _apply(prefix: Prefix, name: str) -> str | None:
    """Return the stored name for a name of the model; None if the prefix does not apply."""
    kind, words = prefix
    if kind == "taken":
        return words + name
    return name.removeprefix(words) if name.startswith(words) else None


def _describe(prefix: Prefix) -> str:
    kind, words = prefix
    return f"{words!r} put before them" if kind == "put" else f"{words!r} taken from them"


# A model's.


def match_model(
    model: nn.Module, groups: Iterable[Sequence[str]], state_dict: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return the stored name of each parameter and persistent buffer; raise a SplitError that lists
    missing tensors and tensors with another shape."""
    persistent: Mapping[str, Any] = model.state_dict()
    tensors = {name: value for name, value in persistent.items() if isinstance(value, Tensor)}
    tied = [tuple(name for name in names if name in tensors) for names in groups]
    held = {name for names in tied for name in names}
    tied += [(name,) for name in tensors if name not in held]
    found = match_names(filter(None, tied), state_dict)
    there = frozenset(state_dict)  # `in` may load what it looks for
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in tensors and name in there:  # an old file's, as built
            found[name], tensors[name] = name, buffer
    faults = list(_list_misfits(tensors, found, state_dict))
    lost = [n[0] for n in tied if n and not any(name in found for name in n)]
    kept = {name for name in lost if _is_constant(model, name)}
    lost = [name for name in lost if name not in kept]
    if lost:
        some = ", ".join(map(repr, islice(state_dict, 3)))
        what = f"no {lost[0]!r}" if len(lost) == 1 else _list_some(lost)
        faults.append(f"the state dict has {what}; it has {some} and so on")
    if faults:
        more = f"; and {len(faults) - MANY} more" if len(faults) > MANY else ""
        raise SplitError("; ".join(faults[:MANY]) + more)
    if kept:
        log.info(
            "buffers that are missing in the state dict keep their initial values: %s",
            ", ".join(sorted(kept)),
        )
    unused = sorted(there - set(found.values()))
    if unused:
        log.info(
            "%d tensors of the state dict are not in the model and are ignored: %s",
            len(unused),
            unused[:MANY],
        )
    return found


def _list_some(lost: Sequence[str]) -> str:
    more = f" and {len(lost) - MANY} more" if len(lost) > MANY else ""
    return f"none of {', '.join(map(repr, lost[:MANY]))}{more}"


def _list_misfits(
    tensors: Mapping[str, Tensor], found: Mapping[str, str], state_dict: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield tensors whose shape is known to differ; others are compared when tensors are read."""
    shape_of = getattr(state_dict, "shape_of", None)
    if shape_of is None and not isinstance(state_dict, dict):
        return
    for name, stored in found.items():
        shape = tuple(state_dict[stored].shape if shape_of is None else shape_of(stored))
        if shape != tuple(tensors[name].shape):
            yield describe_misfit(stored, shape, tuple(tensors[name].shape))


def describe_misfit(stored: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{stored!r} has shape {list(shape)} in the state dict, {list(wanted)} in the model"


def _is_constant(model: nn.Module, name: str) -> bool:
    """Return True for a buffer that its constructor sets and training never changes, such as a
    table of positions, but not for a batch norm's running averages."""
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    buffer = owner._buffers.get(own)
    return buffer is not None and not buffer.is_meta and not isinstance(owner, _NormBase)

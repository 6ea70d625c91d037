"""Which segments of a model are equal, and what a profile says of the model itself.

Two segments are equal if their parameters have the same shapes in the same order, the same crosses
into and out of them, and the dry run counted the same work. A few of them are measured for all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from varuna_core.planner.profile.profile import Tie
from varuna_core.runtime.comm.values import sign
from varuna_core.runtime.split.split import Split


def find_classes(split: Split) -> list[tuple[int, ...]]:
    """Every segment once, with its equals, in the model's order."""
    held: dict[int, list[Any]] = {}
    parameters = dict(split.model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        for segment in sorted(split.segments[name]):
            described = (
                tuple(parameter.shape),
                str(parameter.dtype),
                parameter.requires_grad,
                split.groups[name][0] != name or len(split.segments[name]) > 1,
            )
            held.setdefault(segment, []).append(described)
    record, last = split.record, len(split.stages) - 1
    classes: dict[Any, list[int]] = {}
    for segment in range(last + 1):
        before = record.cuts[segment - 1].specs if segment else None
        after = record.cuts[segment].specs if segment < last else None
        work = f"{record.costs[segment]:.9e}"
        key = (tuple(held.get(segment, ())), before, after, work)
        classes.setdefault(key, []).append(segment)
    return [tuple(found) for found in classes.values()]


def choose_samples(classes: Sequence[tuple[int, ...]], most: int) -> dict[int, tuple[int, ...]]:
    """The segments to measure, evenly spread in each class, and the class of each."""
    chosen: dict[int, tuple[int, ...]] = {}
    for equals in classes:
        count = min(most, len(equals))
        places = {round(i * (len(equals) - 1) / max(1, count - 1)) for i in range(count)}
        chosen |= {equals[place]: equals for place in sorted(places)}
    return dict(sorted(chosen.items()))


def list_ties(split: Split) -> tuple[Tie, ...]:
    """Weights that several segments use; `split` has a stage for each segment."""
    parameters = dict(split.model.named_parameters(remove_duplicate=False))
    return tuple(
        Tie(segments=tie.stages, parameters=parameters[tie.names[0]].numel())
        for tie in split.ties
        if len(tie.stages) > 1
    )


def digest_model(model: nn.Module, inputs: Mapping[str, Any], precision: str) -> str:
    """Of all shapes: modules, parameters, buffers, one sample, the precision. Not of values."""
    words = [
        precision,
        repr(sign(dict(inputs))),
        [[name, type(module).__name__] for name, module in model.named_modules()],
        [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()],
        [[n, list(b.shape), str(b.dtype)] for n, b in model.named_buffers()],
    ]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]

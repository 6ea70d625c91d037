"""Convert a rank's weights, buffers and optimizer state to checkpoint entries by name, and back.

The options of an optimizer's parameter group (such as learning rate and weight decay) are stored
for each of its parameters, because groups hold other parameters if the model is cut elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from varuna_core.checkpoint.format.box import Box, TensorShare
from varuna_core.checkpoint.format.entries import Entry, make_entry
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import BUFFER, WEIGHT
from varuna_core.checkpoint.format.plain import to_plain
from varuna_core.checkpoint.store.reader import WantedTensor
from varuna_core.checkpoint.store.torch_state import take_state
from varuna_core.runtime.optim.precision import Masters
from varuna_core.runtime.split.record import tensor_names
from varuna_core.runtime.split.split import RankStages, Split
from varuna_core.runtime.tensor_parallel.shares import Shares

log = logging.getLogger(__name__)
# Optimizer state.

NOT_OPTIONS = {"params", "param_names"}
WAYS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that select an optimizer's implementation, which a loaded checkpoint does not change."""


def find_holders(optimizers: Sequence[Any]) -> dict[int, Any]:
    """Return the optimizer of each parameter, keyed by the parameter's id."""
    return {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def list_options(optimizer: Any) -> dict[int, Any]:
    """Return the group options of each parameter as JSON values, keyed by the parameter's id."""
    found: dict[int, Any] = {}
    for group in optimizer.param_groups:
        said = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        options = to_plain(said, f"a parameter group of {type(optimizer).__name__}")
        found |= {id(parameter): options for parameter in group["params"]}
    return found


def take_optimizer(
    name: str,
    parameter: Tensor,
    optimizer: Any,
    options: Mapping[int, Any],
    box: Box | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[list[Entry], Any]:
    """Return the tensor entries of a parameter's state, and its other state; None without state.

    If `box` and `shape` are given, the parameter is a shard of a larger one.
    """
    if id(parameter) not in options:
        return [], None
    state = getattr(optimizer, "state", {}).get(parameter)
    entries, tree = take_state(name, parameter, dict(state) if state else None, box, shape)
    kind = type(optimizer).__name__
    return entries, {"optimizer": kind, "options": options[id(parameter)], "state": tree}


def put_optimizer(optimizer: Any, found: Mapping[int, Any], with_state: bool = True) -> None:
    """Restore optimizer state by parameter id; parameters not in `found` start with no state.

    If `with_state` is false, restore only the groups' options.
    """
    kinds = {tree["optimizer"] for tree in found.values()}
    mine = type(optimizer).__name__
    if with_state and kinds and kinds != {mine}:
        raise CheckpointError(
            f"the checkpoint holds the state of {' and '.join(sorted(kinds))}, but the optimizer "
            f"is {mine}: to continue with the weights only, export the checkpoint and pass the "
            "file as Options(state_dict=...)"
        )
    groups = optimizer.param_groups
    if not with_state or not hasattr(optimizer, "load_state_dict"):
        for group in groups:
            group.update(_find_options(group, found))
        if with_state and hasattr(optimizer, "state"):
            for group in groups:
                _put_state(optimizer.state, group["params"], found)
        return
    packed = optimizer.state_dict()
    order = [parameter for group in groups for parameter in group["params"]]
    states = {i: found[id(p)]["state"] for i, p in enumerate(order) if id(p) in found}
    for said in packed["param_groups"]:
        # torch searches them for each tensor, which takes a list long.
        numbers = range(min(said["params"], default=0), max(said["params"], default=-1) + 1)
        said["params"] = numbers if [*numbers] == said["params"] else said["params"]
    optimizer.load_state_dict(
        {
            **packed,
            "state": {i: state for i, state in states.items() if state},
            "param_groups": [
                {**said, **_find_options(group, found)}
                for said, group in zip(packed["param_groups"], groups, strict=True)
            ],
        }
    )


def drop_state(optimizer: Any) -> None:
    state: Any = getattr(optimizer, "state", None)
    if isinstance(state, MutableMapping):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state.pop(parameter, None)


def _put_state(held: Any, parameters: Sequence[Tensor], found: Mapping[int, Any]) -> None:
    for parameter in parameters:
        held.pop(parameter, None)
        state = found.get(id(parameter), {}).get("state")
        if state:
            held[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) else value
                for key, value in state.items()
            }


def _find_options(group: Mapping[str, Any], found: Mapping[int, Any]) -> dict[str, Any]:
    """Return the saved options common to a group's parameters; others keep their values."""
    said = [found[id(p)]["options"] for p in group["params"] if id(p) in found]
    options: dict[str, Any] = {}
    for key in said[0] if said else ():
        if key in WAYS:
            continue
        values = [one.get(key) for one in said]
        if all(value == values[0] for value in values):
            options[key] = values[0]
        else:
            log.warning("the parameters of a group had several %s: the group keeps its own", key)
    return options


def fit_rates(schedule: Any, optimizer: Any) -> Any:
    """Return the scheduler's state with the learning rates of this optimizer's groups, since rank
    0, which saved the state, may have other groups."""
    if isinstance(schedule, list):
        return [fit_rates(one, optimizer) for one in schedule]
    if not isinstance(schedule, dict):
        return schedule
    fitted = {
        key: fit_rates(value, optimizer) if key == "_schedulers" else value
        for key, value in schedule.items()
    }
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in fitted and all(option in group for group in optimizer.param_groups):
            fitted[key] = [group[option] for group in optimizer.param_groups]
    return fitted


# Tensors of the model.


def list_tensors(split: Split) -> tuple[dict[str, tuple[int, ...]], list[list[str]]]:
    """Return the shapes of parameters and persistent buffers under all names, and tied names."""
    model = split.model
    persistent = model.state_dict().keys()
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    held: dict[str, Tensor] = {
        **parameters,
        **{n: b for n, b in buffers.items() if n in persistent},
    }
    ties = [list(names) for name, names in split.groups.items() if names[0] == name and names[1:]]
    for names in tensor_names(model).values():
        kept = [name for name in names if name in held and name not in parameters]
        ties += [kept] if kept[1:] else []
    return {name: tuple(tensor.shape) for name, tensor in held.items()}, ties


def take_tensors(
    split: Split, part: RankStages, masters: Masters, optimizers: Sequence[Any]
) -> tuple[dict[int, list[Entry]], dict[str, Any]]:
    """Return the weights and optimizer state that this rank saves, by segment, and the non-tensor
    state by name. The first of several stages saves a shared weight."""
    segments: dict[int, list[Entry]] = {}
    trees: dict[str, Any] = {}
    holders = find_holders(optimizers)
    options = {key: found for one in optimizers for key, found in list_options(one).items()}
    for stage in part.stages:
        for name in stage.parameters():
            if split.groups[name][0] != name or split.owners(name)[0] != stage.index:
                continue
            if not masters.answers_for(name):
                continue
            master = masters.by_name[name]
            entries, tree = take_optimizer(name, master, holders.get(id(master)), options)
            held = segments.setdefault(min(split.segments[name]), [])
            held += [make_entry(WEIGHT, name, master), *entries]
            if tree is not None:
                trees[name] = tree
    for name, rows in masters.slices.items():
        master = masters.by_name[name]
        holder = holders.get(id(master))
        entries, tree = take_optimizer(name, master, holder, options, rows.box, rows.shape)
        if rows.box.volume:
            made = [make_entry(WEIGHT, name, master, rows.box, rows.shape), *entries]
            of_rows = [entry for entry in made if rows.is_first or entry.shape == rows.shape]
            segments.setdefault(rows.segment, []).extend(of_rows)
        if tree is not None:
            trees[name] = tree
    return segments, trees


def take_buffers(split: Split, part: RankStages, kept: Collection[str]) -> dict[int, list[Entry]]:
    """Return the entries of buffers in `kept` that this rank's stages save, by segment."""
    segments: dict[int, list[Entry]] = {}
    for name, buffer in part.buffers().items():
        if name in kept:
            segment = min(split.record.changes.get(name) or split.segments[name])
            segments.setdefault(segment, []).append(make_entry(BUFFER, name, buffer))
    return segments


def find_part(name: str, masters: Masters, shares: Shares) -> Box | TensorShare | None:
    """Return the part of a tensor that this rank holds; None means all of it."""
    rows = masters.slices.get(name)
    return shares.find(name) if rows is None else rows.box


def list_wanted(name: str, out: Tensor, masters: Masters, shares: Shares) -> list[WantedTensor]:
    """Return the parts of a stored tensor to read into `out`, which is this rank's shard."""
    rows = masters.slices.get(name)
    return (
        shares.list_wanted(name, out)
        if rows is None
        else [WantedTensor(name=name, out=out, box=rows.box)]
    )

"""An optimizer's state by parameter name: taken for a checkpoint, put into another optimizer.

What a group says (rates, decays) is kept for each parameter of it, so that groups may be made of
other parameters where a model is cut elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from varuna_core.checkpoint.format.box import Box
from varuna_core.checkpoint.format.entries import Entry
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.plain import to_plain
from varuna_core.checkpoint.store.optimizer_state import take_state

log = logging.getLogger(__name__)

NOT_OPTIONS = {"params", "param_names"}
WAYS = {"foreach", "fused", "capturable", "differentiable"}
"""How an optimizer computes: the new one's own choice."""


def list_options(optimizer: Any) -> dict[int, Any]:
    """What each parameter's group says, by the parameter's id, as JSON takes it."""
    found: dict[int, Any] = {}
    for group in optimizer.param_groups if optimizer is not None else ():
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
    """Entries of the state's tensors, and the rest; None if the optimizer has not this one.

    With `box` and `shape` the parameter is a piece of one.
    """
    if id(parameter) not in options:
        return [], None
    state = getattr(optimizer, "state", {}).get(parameter)
    entries, tree = take_state(name, parameter, dict(state) if state else None, box, shape)
    kind = type(optimizer).__name__
    return entries, {"optimizer": kind, "options": options[id(parameter)], "state": tree}


def put_optimizer(optimizer: Any, found: Mapping[int, Any], with_state: bool = True) -> None:
    """What was taken, by the id of the parameter; one that is not in it begins anew.

    Without `with_state` the groups' options alone.
    """
    kinds = {tree["optimizer"] for tree in found.values()}
    mine = type(optimizer).__name__
    if with_state and kinds and kinds != {mine}:
        raise CheckpointError(
            f"the checkpoint holds the state of {' and '.join(sorted(kinds))}, the optimizer is "
            f"{mine}: to go on with its weights alone, give Varuna(state_dict=...) an exported file"
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
    """What all parameters of a group say alike; the rest stays as the user made it."""
    said = [found[id(p)]["options"] for p in group["params"] if id(p) in found]
    options: dict[str, Any] = {}
    for key in said[0] if said else ():
        if key in WAYS:
            continue
        values = [one.get(key) for one in said]
        if all(value == values[0] for value in values):
            options[key] = values[0]
        else:
            log.warning("parameters of one group had several %s: the group's own stays", key)
    return options


def fit_rates(schedule: Any, optimizer: Any) -> Any:
    """A scheduler's state with the rates of this optimizer's groups: rank 0, whose state it is, may
    have had other groups."""
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

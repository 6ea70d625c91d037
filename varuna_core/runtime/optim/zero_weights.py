"""Shard weights over the replicas too (ZeRO 3), module by module, with torch's `fully_shard`.

    forward    all-gather the whole weights of one module while the module runs
    backward   the same; then reduce-scatter the gradients to the replicas that hold the rows
    optimizer  updates this rank's rows, as plain parameters on the same memory

The largest modules that run entirely between two cuts and do not share their parameters are
sharded. All others (tied weights, weights that the model reads directly) stay as with ZeRO 2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from varuna_core.runtime.comm.devices import GLOO
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.optim.precision import MicroBatchWeight
from varuna_core.runtime.optim.slices import Slice, take_slice
from varuna_core.runtime.split.split import RankStages, Split
from varuna_core.runtime.split.stage import Stage

log = logging.getLogger(__name__)


def shard_modules(
    split: Split,
    part: RankStages,
    full: dict[str, Tensor],
    links: Links,
    half: torch.dtype | None,
    weight: MicroBatchWeight,
) -> dict[str, Slice]:
    """Shard those modules of the rank's stages that support it; return the slices by name.

    `full` holds the fp32 values of half-precision parameters; values of slices are removed from it.
    """
    from torch.distributed.fsdp import (  # half a second, which others need not wait
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
    )

    device = part.stages[0].device.type
    if device == "cuda" and dist.get_backend(links.replicas) == GLOO:
        raise ValueError("zero=3 needs NCCL, which requires one GPU per rank: use zero=1 or 2")
    if split.record.real:
        log.warning(
            "zero=3: the model's forward depends on values, so replicas might gather the weights "
            "of different modules: the weights stay whole, as with zero=2"
        )
        return {}
    slices: dict[str, Slice] = {}
    mesh = DeviceMesh.from_group(links.mesh, device)
    place = mesh.get_local_rank()
    for stage in part.stages:
        for unit in find_units(split, stage, half is not None):
            module = stage.module.get_submodule(unit)
            names = [f"{unit}.{name}" for name, _ in module.named_parameters()]
            for name in names:
                if name in full:
                    stage.module.get_parameter(name).data = full.pop(name)
            policy = MixedPrecisionPolicy(
                param_dtype=half,
                reduce_dtype=None if half is None else torch.float32,
                cast_forward_inputs=False,
            )
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)
            # torch asks for subclasses of what it does not export, and calls them.
            module.set_custom_all_gather(_Gather(links))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_Scatter(links, weight))  # type: ignore[arg-type]
            for name in names:
                sharded = stage.module.get_parameter(name)
                segment = min(split.segments[name])
                slices[name] = take_slice(sharded, segment, place, mesh.size())
            stage.give_up(names)
    return slices


class _Messages:
    """Sends the messages of sharded modules through the links' own group: torch's modules hold
    their mesh's group for ever, so closing that group could not end a wait."""

    def __init__(self, links: Links) -> None:
        self.links = links

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        return torch.empty(*size, **options)


class _Gather(_Messages):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        group = self.links.replicas
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class _Scatter(_Messages):
    def __init__(self, links: Links, weight: MicroBatchWeight) -> None:
        super().__init__(links)
        self.weight = weight

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        group = self.links.replicas
        if self.weight.factor != 1.0:  # of half precision, summed in fp32
            input_tensor.mul_(self.weight.factor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def find_units(split: Split, stage: Stage, is_half: bool) -> Iterator[str]:
    """Yield the names of the largest modules of a stage that can be sharded."""
    calls: dict[str, set[int]] = {}
    for number, call in enumerate(split.record.calls):
        calls.setdefault(call.module, set()).add(number)
    taken: list[str] = []
    for name, module in stage.module.named_modules():
        inside = any(name.startswith(unit + ".") for unit in taken)
        if inside or not name or not calls.get(name) or name in split.record.edited_views:
            continue
        if _runs_in_one_piece(split, stage, calls[name]) and _is_alone(
            split, module, name, calls[name], is_half
        ):
            taken.append(name)
            yield name


def _runs_in_one_piece(split: Split, stage: Stage, calls: set[int]) -> bool:
    held = [split.record.calls[number] for number in calls]
    return all(call.begin == call.end and call.begin in stage.segments for call in held)


def _is_alone(split: Split, module: nn.Module, name: str, calls: set[int], is_half: bool) -> bool:
    """Return True if a module's parameters can be sharded: trained, and used only by its own calls.

    In a sharded module, torch gives unused parameters a gradient of zeros, so that optimizers decay
    them, and reduces gradients as real numbers, so modules with complex parameters stay whole.
    """
    held = dict(module.named_parameters(prefix=name, remove_duplicate=False))
    for key, parameter in held.items():
        uses = split.record.uses.get(key)
        if not parameter.requires_grad or not parameter.dim() or len(split.groups[key]) > 1:
            return False
        if parameter.is_complex():
            return False
        if key not in split.record.learning:
            return False
        if not uses or not all(split.record.is_within(call, calls) for _, call in uses):
            return False
    types = {parameter.dtype for parameter in held.values()}
    return bool(held) and len(types) == 1 and not (is_half and torch.float32 in types)


def refuse_uneven(samples: Sequence[range], chunk_size: int) -> None:
    """Raise an error if a full batch gives the replicas unequal numbers of micro-batches."""
    counts = [-(-len(held) // chunk_size) for held in samples]
    if len(set(counts)) > 1:
        raise ValueError(
            "zero=3 needs equally many micro-batches on each replica, as they gather weights "
            f"together: this batch_size and chunk_size give {', '.join(map(str, counts))}"
        )

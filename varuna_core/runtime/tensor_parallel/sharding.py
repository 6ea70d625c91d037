"""Shard layers across T ranks with torch's styles: parameters enter a stage, gradients leave it.

    values of a weight ─► this rank's shard ─► local parameter (masters, optimizer, all-reduce)
                                                 │ same memory
    stage's module: torch's hooks ──────────► DTensor ─► its gradient, to the local parameter

docs/tensor_parallel.md describes the design. Imported only if T is more than 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel

from varuna_core.checkpoint.format.box import TensorShare
from varuna_core.runtime.comm.meeting import refuse_batches
from varuna_core.runtime.comm.values import map_leaves
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.split import Split
from varuna_core.runtime.split.stage import Stage, Switch
from varuna_core.runtime.split.weights import find_slot
from varuna_core.runtime.tensor_parallel.draws import ShardedDraws
from varuna_core.runtime.tensor_parallel.plan import (
    Sharing,
    TensorPlan,
    apply_style,
    choose_plan,
    deal_rows,
    match_modules,
    place_parameters,
    resolve_ties,
)
from varuna_core.runtime.tensor_parallel.shares import Shares, compute_share

ALIKE = 0.01
"""Relative difference in norm allowed for gradients that should be equal on all ranks."""

WHOLE = Sharing(placement=Replicate())


class Sharding:
    """One rank's shards of the layers of its stages."""

    def __init__(
        self, split: Split, plan: TensorPlan | None, group: Any, device: torch.device
    ) -> None:
        """`group` holds the ranks that shard layers; all must create this at the same time."""
        self.group: Any = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        # By its name it differs from a mesh of the same ranks before it: torch's caches take equal
        # ones for one, and would go on with the group of the first (torch 2.13).
        name = (str(group.group_name),)
        self.mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=name)
        self.groups = split.groups
        self.styles = match_modules(split.model, choose_plan(split.model, plan))
        placed = place_parameters(split.model, self.styles, self.mesh)
        self.placed = resolve_ties(split.groups, placed)
        """How each parameter in the plan is sharded, keyed by its first name."""

        self._shapes = {n: p.shape for n, p in split.model.named_parameters() if n in self.placed}
        leads = {name: names[0] for name, names in split.groups.items()}
        self.shares = Shares({n: self._compute_share(n) for n in self.placed}, leads, self.rank)
        self.draws = ShardedDraws(split.record, self.size, self.rank)
        self._on_gradient: Callable[[nn.Parameter], None] = lambda parameter: None
        self._held: list[tuple[DTensor, nn.Parameter]] = []

    # The weights of a stage.

    def cut(self, name: str, values: Tensor) -> Tensor:
        """Return this rank's shard of values that the first of the T ranks provides."""
        sharing = self.placed.get(name, WHOLE)
        dealt = deal_rows(values, sharing.parts, self.size)
        made = distribute_tensor(dealt.contiguous(), self.mesh, [sharing.placement])
        return as_plain(made)

    def stand_in(
        self, name: str, original: Tensor, dtype: torch.dtype, device: torch.device, is_early: bool
    ) -> nn.Parameter:
        """Return a full-shape parameter with one column's memory, to check the plain stage."""
        if is_early:
            raise SplitError(
                f"the tensor plan shards {name!r}, which is read by code before the stage that "
                "holds it: remove its module from the plan, or choose another partition"
            )
        column = torch.ones(original.shape[:1]).uniform_(
            0.01, 0.1, generator=torch.Generator().manual_seed(0)
        )
        made = column.to(device, dtype).view(-1, *[1] * (original.dim() - 1))
        return nn.Parameter(made.expand(original.shape), requires_grad=False)

    def install(self, stage: Stage, local: Mapping[str, nn.Parameter]) -> None:
        """Make the stage's modules compute with shards; `local` holds its parameters by name."""
        for path, style in self.styles.items():
            if self._is_live(stage, path):
                self._apply(path, style, stage)
        made: dict[str, DTensor] = {}
        for name, parameter in local.items():
            first = self.groups[name][0]
            if first in self.placed:
                if first not in made:
                    made[first] = self._wrap(first, parameter)
                    self._held.append((made[first], parameter))
                slots, own = find_slot(stage.module, name)
                slots[own] = made[first]
        stage.at_cut, stage.at_return = leave_stage, return_plain
        stage.draws = self.draws if self.draws.is_needed else None

    def _is_live(self, stage: Stage, path: str) -> bool:
        calls = [call for call in stage.record.calls if call.module == path]
        held = stage.segments
        return not calls or any(
            call.begin < held.stop and (call.end >= held.start or call.end < 0) for call in calls
        )

    def _apply(self, path: str, style: ParallelStyle, stage: Stage) -> None:
        """Install the style's hooks, which are inactive while code before the stage runs."""
        module = stage.module.get_submodule(path)
        kept = [(part, dict(part._parameters)) for part in module.modules()]
        known = {*module._forward_pre_hooks, *module._forward_hooks}
        for part, parameters in kept:
            for own, parameter in parameters.items():
                if parameter is not None:
                    bare = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                    part._parameters[own] = bare
        apply_style(path, module, style, self.mesh)
        for part, parameters in kept:
            part._parameters.update(parameters)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in hooks.keys() - known:
                hooks[key] = _rest_before(hooks[key], stage.switch)

    def _wrap(self, name: str, local: nn.Parameter) -> DTensor:
        """Return a DTensor that shares memory with a local parameter, which gets its gradients."""
        sharing, shape = self.placed[name], self._shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        data = DTensor.from_local(
            local.detach(), self.mesh, [sharing.placement], run_check=False,
            shape=shape, stride=stride,
        )  # fmt: skip
        made: Any = nn.Parameter(data, requires_grad=local.requires_grad)
        if local.requires_grad:
            made.register_post_accumulate_grad_hook(partial(self._take_gradient, local))
        held: DTensor = made
        return held

    def release(self) -> None:
        """Release the group, which the mesh and thus all DTensors refer to (torch 2.13)."""
        self.group = None
        getattr(self.mesh, "_pg_registry", {}).clear()

    # In a step.

    @contextmanager
    def running(self, on_gradient: Callable[[nn.Parameter], None]) -> Iterator[None]:
        """Return the context for all computation of a step or an evaluation. `on_gradient` is
        called with each local parameter that gets a gradient."""
        self._on_gradient = on_gradient
        for held, local in self._held:
            if held.requires_grad != local.requires_grad:
                held.requires_grad_(local.requires_grad)
        with loss_parallel(), self.draws.running():
            yield

    @torch.no_grad()
    def _take_gradient(self, local: nn.Parameter, held: Any) -> None:
        """Add the DTensor's gradient from autograd to the local parameter's gradient."""
        gradient, held.grad = held.grad, None
        (own,), (placement,) = held.placements, gradient.placements
        if own.is_replicate() and placement.is_replicate():
            # The T ranks' are summed at the end: the others' are parts, of these one is all.
            mine = torch.zeros_like(local) if self.rank else as_plain(gradient)
        elif placement == own or (own.is_replicate() and placement == Partial()):
            mine = as_plain(gradient)
        elif own.is_replicate():
            mine = as_plain(gradient.redistribute(placements=[Partial()]))
        else:
            mine = as_plain(gradient.redistribute(placements=[own]))
        if local.grad is not None:
            local.grad.add_(mine)
        elif mine.stride() == local.stride() and mine.dtype == local.dtype:
            local.grad = mine
        else:
            local.grad = torch.empty_like(local).copy_(mine)
        self._on_gradient(local)

    def list_whole(self) -> set[str]:
        """Return names of parameters that are in the plan but whole on each rank."""
        return {
            name
            for name, names in self.groups.items()
            if self.placed.get(names[0]) and self.placed[names[0]].placement.is_replicate()
        }

    def is_counted(self, name: str) -> bool:
        """Return True if this rank counts its shard of a parameter in the norm."""
        sharing = self.placed.get(self.groups[name][0], WHOLE)
        return self.rank == 0 or not sharing.placement.is_replicate()

    def expect_same(self, batch: str) -> None:
        """Raise an error if the batch's shapes (described in `batch`) differ between the T ranks,
        since collectives within layers would hang."""
        digest = int.from_bytes(hashlib.sha256(batch.encode()).digest()[:7], "big")
        ends = torch.tensor([digest, -digest])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        if int(ends.sum()):
            batches: list[str] = [""] * self.size
            dist.all_gather_object(batches, batch, group=self.group)
            refuse_batches(
                dict(zip(dist.get_process_group_ranks(self.group), batches, strict=True))
            )

    def compare(self, gradients: Mapping[str, Tensor]) -> bool:
        """Raise an error if the gradient of a parameter outside the plan differs between the T
        ranks. Return False if there was nothing to compare."""
        alike = {n: g for n, g in gradients.items() if self.groups[n][0] not in self.placed}
        if not gradients:
            return False
        figures = torch.zeros(len(alike), 2, dtype=torch.float64)
        for place, gradient in enumerate(alike.values()):
            found = gradient.double()
            figures[place, 0] = found.norm()
            figures[place, 1] = found.sum() / max(1, found.numel()) ** 0.5
        ends = torch.stack([figures, -figures])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        if not ends.isfinite().all():
            return False  # an overflow: the next step
        spread, scale = ends.sum(0).amax(1), ends[0, :, 0]
        for name, apart, size in zip(alike, spread.tolist(), scale.tolist(), strict=True):
            if apart > ALIKE * size:
                raise RuntimeError(
                    f"the gradient of {name!r} differs between the {self.size} ranks that shard "
                    "layers: each uses it on a part of the activations. Add its module to the "
                    "tensor plan: SequenceParallel(), ColwiseParallel() or RowwiseParallel()"
                )
        return True

    def _compute_share(self, name: str) -> TensorShare:
        shape, sharing = self._shapes[name], self.placed[name]
        if sharing.placement.is_replicate():
            return TensorShare(shape=tuple(shape), extent=tuple(shape), pieces=())
        dim = int(sharing.placement.dim)  # type: ignore[attr-defined]  # of those that share
        index = deal_rows(torch.arange(shape[dim]), sharing.parts, self.size)
        index = index.view(*(-1 if d == dim else 1 for d in range(len(shape))))
        held = distribute_tensor(index, self.mesh, [sharing.placement], src_data_rank=None)
        return compute_share(shape, dim, as_plain(held).flatten().tolist())


def _rest_before(hook: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return None if switch.on else hook(*args, **kwargs)

    return run


def as_plain(tensor: Any) -> Tensor:
    """Return the full local tensor of a DTensor, detached from any graph."""
    with torch.no_grad():
        local = tensor.to_local()
    arrived: Tensor = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return arrived


def return_plain(value: Any) -> Any:
    """Return the model's output with DTensors replaced by full tensors."""

    def convert(leaf: Any) -> Any:
        return arrive(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)

    return map_leaves(convert, value)


def leave_stage(values: Any) -> Any:
    """Return the values of a cut in a form that can be sent; raise an error for a DTensor."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            raise SplitError(
                f"a DTensor ({leaf.placements[0]} of {list(leaf.shape)}) reaches a cut, which "
                "only plain tensors can cross: set use_local_output=True in the style before it"
            )
        return arrive(leaf)

    return map_leaves(convert, values)


def arrive(leaf: Any) -> Any:
    """Return a plain copy of a tensor that a collective is still computing (torch 2.13)."""
    return leaf.clone() if isinstance(leaf, AsyncCollectiveTensor) else leaf

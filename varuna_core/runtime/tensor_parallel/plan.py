"""Read a model's tensor parallel plan: which of its modules are sharded, and how.

The plan is applied to a copy on the meta device, where torch's placement of each parameter shows
how the parameter is sharded. So any style of torch or of a user works without a second set of
rules. A style for packed layers, which torch does not have, is also defined here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

from varuna_core.runtime.split.cut import CutPoint, SplitError
from varuna_core.runtime.split.weights import copy_to_meta


class PackedColwise(ColwiseParallel):
    """Style for a linear layer whose rows belong to several packed layers: query, key and value, or
    an MLP's gate and values. Each rank holds its shard of each of these."""

    def __init__(
        self,
        *,
        parts: int,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.parts = parts

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            dealt = deal_rows(parameter.detach(), self.parts, device_mesh.size())
            module.register_parameter(own, nn.Parameter(dealt, parameter.requires_grad))
        super()._partition_linear_fn(name, module, device_mesh)  # type: ignore[no-untyped-call]

    def _partition_embedding_fn(self, *args: Any) -> None:
        raise ValueError("PackedColwise is for linear layers, not for an embedding")


def deal_rows(tensor: Tensor, parts: int, ranks: int) -> Tensor:
    """Return the rows ordered by the rank that gets them, then by part.

    parts = 3, ranks = 2        q q k k v v  ->  q k v | q k v
    """
    if parts == 1:
        return tensor
    if tensor.shape[0] % (parts * ranks):
        raise ValueError(
            f"{tensor.shape[0]} rows of {parts} parts cannot be sharded evenly over {ranks} ranks"
        )
    rest = tensor.shape[1:]
    return tensor.reshape(parts, ranks, -1, *rest).transpose(0, 1).reshape(-1, *rest)


TensorPlan = Mapping[str, ParallelStyle]
"""Styles, keyed by paths of modules, in which `*` matches one component."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How one parameter is sharded across ranks."""

    placement: Placement
    parts: int = 1
    """Number of consecutive blocks of rows, each of which is sharded (`PackedColwise`)."""


def choose_plan(model: nn.Module, given: TensorPlan | None) -> TensorPlan:
    """Return the given plan, or the model's own."""
    plan: Any = given if given is not None else getattr(model, "tensor_parallel_plan", None)
    if callable(plan):
        plan = plan()
    if not plan:
        raise ValueError(
            f"tensor parallelism: {type(model).__name__} has no tensor_parallel_plan; give it one, "
            'or Options(tensor_plan={"blocks.*.mlp.up": ColwiseParallel(), ...})'
        )
    found: TensorPlan = plan
    return found


def match_modules(model: nn.Module, plan: TensorPlan) -> dict[str, ParallelStyle]:
    """Return the style of each module that matches the plan, keyed by the module's path."""
    first = {id(module): path for path, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    patterns: dict[str, str] = {}
    for pattern in plan:
        paths = {first[id(m)] for path, m in modules.items() if path and _matches(path, pattern)}
        if not paths:
            near = difflib.get_close_matches(pattern, modules, 1)
            hint = f"; there is {near[0]!r}" if near else ""
            raise ValueError(f"the tensor plan names {pattern!r}, which is not a module{hint}")
        for path in paths:
            if path in patterns:
                raise ValueError(
                    f"the tensor plan names {path!r} twice, by {patterns[path]!r} and {pattern!r}"
                )
            patterns[path] = pattern
    matched = {path: plan[patterns[path]] for path in modules if path in patterns}
    for path, style in matched.items():
        _check(path, modules[path], style)
    return matched


def _matches(path: str, pattern: str) -> bool:
    words, wanted = path.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(map(fnmatchcase, words, wanted))


def _check(path: str, module: nn.Module, style: Any) -> None:
    if not isinstance(style, ParallelStyle):
        raise ValueError(
            f"the tensor plan gives {path!r} a {type(style).__name__}; expected a style of "
            "torch.distributed.tensor.parallel, such as ColwiseParallel()"
        )
    buffer = next((name for name, _ in module.named_buffers()), None)
    if buffer is not None:
        raise SplitError(
            f"the tensor plan names {path!r}, which holds the buffer {buffer!r}: buffers cannot "
            "be sharded, so name those of its modules that have none"
        )
    if any(isinstance(part, CutPoint) for part in module.modules()):
        raise SplitError(
            f"the tensor plan names {path!r}, which holds a CutPoint: name the modules in it that "
            "lie between two cuts"
        )


def place_parameters(
    model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> dict[str, Sharing]:
    """Return how the styles shard each parameter, under each of its names."""
    placed: dict[str, Sharing] = {}
    bare = copy_to_meta(model)
    shapes = {name: p.shape for name, p in bare.named_parameters(remove_duplicate=False)}
    parts: dict[str, int] = {}
    for path, style in styles.items():
        module = bare.get_submodule(path)
        apply_style(path, module, style, mesh)
        for name, _ in module.named_parameters():
            parts[f"{path}.{name}"] = getattr(style, "parts", 1)
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        if shapes.pop(name, None) != parameter.shape:
            raise SplitError(f"the tensor plan changes the shape or the name of {name!r}")
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            if placement.is_partial():
                raise SplitError(
                    f"the tensor plan makes {name!r} a partial sum (Partial) over ranks, which is "
                    "not supported"
                )
            count = parts.get(name, 1) if placement.is_shard(0) else 1
            placed[name] = Sharing(placement=placement, parts=count)
    if shapes:
        raise SplitError(f"the tensor plan removes {next(iter(shapes))!r} from its module")
    return placed


def apply_style(path: str, module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Apply a ParallelStyle to a module on the meta device; raise SplitError if it cannot be."""
    try:
        parallelize_module(module, mesh, style, src_data_rank=None)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise SplitError(
            f"the tensor plan: {type(style).__name__} cannot be applied to {path!r}, a "
            f"{type(module).__name__}: {error}"
        ) from error


def resolve_ties(
    groups: Mapping[str, tuple[str, ...]], placed: Mapping[str, Sharing]
) -> dict[str, Sharing]:
    """Return the sharding by each parameter's first name; all names of a tensor must agree."""
    settled: dict[str, Sharing] = {}
    for name, names in groups.items():
        if names[0] != name:
            continue
        ways = {other: placed.get(other) for other in names}
        if len(set(ways.values())) > 1:
            shown = ", ".join(f"{n!r} {w.placement if w else 'whole'}" for n, w in ways.items())
            raise SplitError(
                f"the tensor plan shards the names of one tied weight differently: {shown}; use "
                "RowwiseParallel for an embedding whose head has ColwiseParallel"
            )
        if ways[name] is not None:
            settled[name] = placed[name]
    return settled

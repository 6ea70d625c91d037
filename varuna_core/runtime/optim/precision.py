"""Choose which tensors of a stage are in fp32, bf16 or fp16, and keep fp32 masters of the half
ones.

    micro-batch:  half weights ─► half gradients ─► accumulated in the masters' fp32 `.grad`
    optimizer:    updates the masters, which are the only tensors in `parameters()`
    next step:    masters ─► half weights

Batch norm keeps its parameters and statistics in fp32, as torch's kernels for half inputs expect: 8
bits are too few for averages over many batches. Modules that the user names also stay in fp32
(split/kept.py), and inputs that the user names are not cast.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from varuna_core.runtime.optim.slices import Slice
from varuna_core.runtime.split.kept import KeptModules

log = logging.getLogger(__name__)

TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PIECE = 2**18
"""Number of elements of a chunk of a gradient: 1 MiB in fp32, which fits in a cache."""

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision that a user requested."""

    name: str
    keep: tuple[str, ...] = ()
    """Patterns for the names of inputs and modules that stay in fp32."""

    def keeping(self, names: Sequence[str]) -> Precision:
        if isinstance(names, str):
            raise ValueError(f"keep_fp32 must be a list of names: [{names!r}]")
        return replace(self, keep=tuple(names))

    @property
    def half(self) -> torch.dtype | None:
        """Return the half-precision dtype; None means that the model's own dtypes are used."""
        return TYPES[self.name]

    def choose_types(self, model: nn.Module) -> dict[int, torch.dtype]:
        """Return the dtypes of parameters and buffers, by id, that differ from the model's own."""
        if self.half is None:
            return {}
        full, half = set(), {}
        kept: dict[int, str] = {}
        others: dict[int, str] = {}
        for path, module in model.named_modules():
            is_kept = self._keeps(path)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.dtype not in FLOATS:
                    continue
                (kept if is_kept else others)[id(tensor)] = f"{path}.{name}".lstrip(".")
                if isinstance(module, _BatchNorm) or is_kept:
                    full.add(id(tensor))
                half[id(tensor)] = self.half
        for key in kept.keys() & others.keys():
            raise ValueError(
                f"keep_fp32 includes {kept[key]!r}, which is the same tensor as {others[key]!r} "
                "of a module that it does not include: include both modules, or neither"
            )
        return half | dict.fromkeys(full, torch.float32)

    def select_kept(self, model: nn.Module) -> KeptModules:
        """Return the outermost modules that are to stay in fp32."""
        if self.half is None or not self.keep:
            return KeptModules()
        found: list[str] = []
        for path, _ in model.named_modules():
            if self._keeps(path) and not any(path.startswith(f"{name}.") for name in found):
                found.append(path)
        return KeptModules(names=tuple(found), half=self.half)

    def check_names(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Raise an error if a pattern matches nothing."""
        leaves = [name for name, _ in _list_leaves(inputs)]
        modules = [path for path, _ in model.named_modules() if path]
        for pattern in self.keep:
            if not any(_matches(name, pattern) for name in (*leaves, *modules)):
                near = difflib.get_close_matches(pattern, modules, 3, 0.5) or modules[:3]
                raise ValueError(
                    f"keep_fp32 names {pattern!r}, which is neither an input nor a module: inputs "
                    f"are {', '.join(map(repr, leaves))}; modules are {', '.join(map(repr, near))} "
                    "and so on"
                )

    def cast(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with its floating-point inputs in half precision, like the weights."""
        half = self.half
        if half is None:
            return dict(inputs)

        def cast_one(path: Any, leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.dtype in FLOATS
            keep = floating and bool(self.keep) and self._keeps(_spell(path))
            return leaf.to(half) if floating and not keep else leaf

        return dict(pytree.tree_map_with_path(cast_one, dict(inputs)))

    def warn_of_lost_numbers(self, inputs: Mapping[str, Any]) -> None:
        """Warn of whole numbers in floating-point inputs (time steps) that would be rounded."""
        for name, leaf in _list_leaves(inputs):
            if self.half is None or not isinstance(leaf, Tensor) or leaf.dtype not in FLOATS:
                continue
            values = leaf.detach()
            lost = (values == values.round()) & (values.to(self.half).to(values.dtype) != values)
            lost &= values.isfinite()
            if not self._keeps(name) and bool(lost.any()):
                first = values[lost][0]
                log.warning(
                    "input %r has whole numbers that %s cannot represent: %g becomes %g. Set "
                    "keep_fp32=[%r] to keep the input in fp32",
                    name, self.name, first, first.to(self.half), name,
                )  # fmt: skip

    def _keeps(self, path: str) -> bool:
        return any(_matches(path, pattern) for pattern in self.keep)


def _matches(path: str, pattern: str) -> bool:
    """Return True if the pattern matches this path or a prefix of it; `*` does not match a dot."""
    words, wanted = path.split("."), pattern.split(".")
    return len(words) >= len(wanted) and all(map(fnmatchcase, words, wanted))


def _list_leaves(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    leaves, _ = pytree.tree_flatten_with_path(dict(inputs))
    return [(_spell(path), leaf) for path, leaf in leaves]


def _spell(path: Any) -> str:
    """Return the path to an input in dotted form: `when.steps.0`."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def choose_precision(fp16: bool, precision: str | None) -> Precision:
    """Return the precision from Varuna's arguments: `fp16`, as in the original, or `precision`."""
    if precision is not None and precision not in TYPES:
        raise ValueError(f"precision {precision!r} is not supported: use one of {', '.join(TYPES)}")
    if fp16 and precision not in (None, "fp16"):
        raise ValueError(f"fp16=True and precision {precision!r}: pass only one of the two")
    return Precision(name="fp16" if fp16 else precision or "fp32")


@dataclass(kw_only=True)
class MicroBatchWeight:
    """The weight of a micro-batch's gradients, split into two factors.

    A half-precision loss would round the start gradient of its backward: a weight of 3/7 to 8 bits,
    and to infinity with a large loss scale. So a backward starts from a power of two, and gradients
    are multiplied by the rest of the weight when they are accumulated in fp32. This second factor
    also removes the loss scale.
    """

    loss_type: torch.dtype | None = None
    """Dtype of the loss in the dry run."""

    factor: float = 1.0
    """Factor applied to each gradient when it is accumulated."""

    def split(self, weight: float, loss_scale: float) -> float:
        """Return the gradient with which the loss's backward starts."""
        exponent = math.floor(math.log2(weight * loss_scale))
        if self.loss_type is torch.float16:
            exponent = max(-14, min(15, exponent))
        seed = 2.0**exponent
        self.factor = weight / seed
        return seed


class Masters:
    """The parameters that an optimizer updates, and the places where gradients accumulate.

        parameter   the tensor that the model computes with
        place       tensor whose `.grad` accumulates: the parameter if fp32, else an fp32 stand-in
        master      tensor that the optimizer updates: the place, or a copy on the host (offload);
                    none if another replica owns the parameter (zero.py)

    For a frozen parameter, all three are the same tensor, on every replica.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        *,
        owned: Collection[str] | None = None,
        offload: bool = False,
        slices: Mapping[str, Slice] = MappingProxyType({}),
    ) -> None:
        """`values` holds fp32 values of half-precision parameters. This rank holds the masters
        named in `owned` (all if not given) and those of the `slices`."""
        held = {**parameters, **{name: rows.own for name, rows in slices.items()}}
        self.owned, self.offload, self.slices = owned, offload, slices
        self.by_name: dict[str, nn.Parameter] = {}
        """The masters on this rank, by name."""

        self.places: dict[str, nn.Parameter] = {}
        """Places of the stage's parameters by name, regardless of owner, without slices."""

        self._parameters = [*{id(p): p for p in parameters.values()}.values()]
        self._place_of: dict[int, nn.Parameter] = {}
        self._master_of: dict[int, nn.Parameter] = {}
        for name, parameter in held.items():
            key = id(parameter)
            if key not in self._place_of:
                self._make(name, parameter, values.get(name))
            if name in parameters:
                self.places[name] = self._place_of[key]
            if key in self._master_of:
                self.by_name[name] = self._master_of[key]
        once = {id(parameter): parameter for parameter in held.values()}.values()
        made = [(p, self._master_of.get(id(p))) for p in once]
        self._copies = [(p, master) for p, master in made if master is not None and master is not p]
        self._read: list[Any] = []
        """For each GPU, an event recorded after the masters were read."""

        trained = [(p, master) for p, master in made if master is not None and p.requires_grad]
        self.pairs = [(self.place_of(parameter), master) for parameter, master in trained]
        """Place and master of each parameter, or slice, that this rank owns and trains."""

    def _make(self, name: str, parameter: nn.Parameter, full: Tensor | None) -> None:
        place = parameter
        owned = self.answers_for(name) or not parameter.requires_grad
        master: nn.Parameter | None = None
        if parameter.requires_grad and full is not None:
            at_hand = owned and not self.offload
            place = nn.Parameter(full) if at_hand else make_place(full)
        if owned and parameter.requires_grad and self.offload:
            master = nn.Parameter(copy_to_host(parameter if full is None else full))
        elif owned:
            master = place
        self._place_of[id(parameter)] = place
        if master is not None:
            self._master_of[id(parameter)] = master

    def answers_for(self, name: str) -> bool:
        """Return True if this rank is the replica that owns this parameter."""
        return self.owned is None or name in self.owned or name in self.slices

    def place_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor in whose `grad` a stage parameter's gradient accumulates."""
        return self._place_of[id(parameter)]

    def list_places(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return pairs of each parameter used in the forward and the tensor whose `grad`
        accumulates its gradient: the same parameter, or its fp32 counterpart."""
        return [(parameter, self.place_of(parameter)) for parameter in self._parameters]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the weights from the masters on this rank."""
        if not self._copies:
            return
        for parameter, master in self._copies:
            if parameter.requires_grad != master.requires_grad:
                parameter.requires_grad_(master.requires_grad)
        if not self.offload:
            torch._foreach_copy_([p for p, _ in self._copies], [m for _, m in self._copies])
            return
        for parameter, master in self._copies:
            # Pinned memory goes to a GPU as it is and becomes half there: the host would make it
            # half first, in memory that the GPU cannot read by itself.
            same = parameter.dtype == master.dtype
            there = master if same else master.to(parameter.device, non_blocking=True)
            parameter.copy_(there, non_blocking=True)
            del there
        devices = {parameter.device for parameter, _ in self._copies if parameter.is_cuda}
        self._read = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait_read(self) -> None:
        """Wait until the device has read what `refresh` copies, so that masters may change."""
        for event in self._read:
            event.synchronize()
        self._read = []

    def take_gradient(self, parameter: nn.Parameter, factor: float) -> nn.Parameter:
        """Add the parameter's new gradient, times `factor`, to its accumulated gradient. Called
        without autograd, as hooks are, for each parameter of each micro-batch."""
        place = self.place_of(parameter)
        gradient = parameter.grad
        if place is not parameter and gradient is not None:
            if place.grad is None:
                place.grad = gradient.to(place.dtype, copy=True).mul_(factor)
            else:
                add_wide(place.grad, gradient, factor)
            parameter.grad = None
        return place

    @torch.no_grad()
    def land_gradients(self) -> None:
        """Copy gradients to masters on the host, and wait until the copies are complete."""
        devices = set()
        for place, master in self.pairs:
            if place is master:
                continue
            gradient, place.grad = place.grad, None
            if gradient is not None:
                devices.add(gradient.device)
                master.grad = copy_to_host(gradient, wait=False)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def add_wide(total: Tensor, gradient: Tensor, factor: float) -> None:
    """Add a half-precision gradient, in chunks on a CPU, which first converts each to fp32."""
    if not total.is_cpu or total.numel() <= PIECE or total.dtype == gradient.dtype:
        total.add_(gradient, alpha=factor)
        return
    rows = max(1, PIECE // max(1, total[:1].numel()))
    for to, piece in zip(torch.split(total, rows), torch.split(gradient, rows), strict=True):
        to.add_(piece, alpha=factor)


def make_place(like: Tensor) -> nn.Parameter:
    """Return a parameter whose `grad` can have the shape of `like`, with memory for one element."""
    return nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape))


def copy_to_host(tensor: Tensor, wait: bool = True) -> Tensor:
    """Return a copy in host memory, pinned if it comes from a GPU.

    If `wait` is false, the copy is complete only when the stream's work is.
    """
    pinned = tensor.device.type == "cuda"
    made = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)
    return made.copy_(tensor.detach(), non_blocking=pinned and not wait)

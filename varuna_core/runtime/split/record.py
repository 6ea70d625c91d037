"""Record of a dry run: calls, cuts, uses of parameters and buffers, costs of segments.

The cost of an operation is the maximum of its compute time and its memory time on a nominal GPU.
Unlike measured times, these costs are equal on every rank and in every run, so ranks that balance
stages by them agree without communication. The profiler passes measured times as `costs` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from varuna_core.runtime.comm.values import TensorSpec, tensors_of
from varuna_core.runtime.split.attributes import Place
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.inputs import InputTrace
from varuna_core.runtime.split.loss import LossForm


@dataclass(kw_only=True)
class Call:
    module: str
    parent: int | None
    """Index of the call that made this one."""

    begin: int
    """The segment in which the call begins."""

    end: int = -1
    """The segment in which the call returns; -1 if it did not return."""

    output: Any = None
    """The call's result, with a TensorSpec for each tensor."""

    opaque: bool = True
    """True if a stub cannot replace the result."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A CutPoint that the forward passed."""

    name: str
    specs: tuple[TensorSpec, ...]
    """The tensors that cross the cut."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """An operation that draws random numbers, and the tensor that receives them."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_checkpointed: bool = False
    """True if a checkpointed backward will run the operation again."""

    call: int | None = None
    """Index of the innermost call around the operation."""


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an operation draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    rate = {**dict(named), **kwargs}.get("dropout_p")
    has_rate = any(argument.name == "dropout_p" for argument in func._schema.arguments)
    return bool(rate) or not has_rate


def find_drawn(func: Any, args: Any, out: Any) -> Tensor | None:
    """Return the tensor that gets the random numbers: the one filled, masked or created."""
    first = func._schema.arguments[0] if func._schema.arguments else None
    fills = first is not None and first.alias_info is not None and first.alias_info.is_write
    if fills or func.overloadpacket is torch.ops.aten.native_dropout:
        return args[0] if isinstance(args[0], Tensor) else None
    return next(iter(tensors_of(out)), None)


@dataclass(kw_only=True)
class AttributeChange:
    """A change that a forward makes to a plain attribute of a module."""

    segments: set[int] = field(default_factory=set)
    """Segments that change the attribute in each forward; empty if only the first forward does."""

    is_carried: bool = False
    """True if the next forward depends on the value: a number, a random generator, or a tensor that
    is read before it is replaced."""


@dataclass(kw_only=True)
class Record:
    """Observations of one dry run."""

    calls: list[Call] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    costs: list[float] = field(default_factory=lambda: [0.0])
    uses: dict[str, set[tuple[int, int | None]]] = field(default_factory=dict)
    """Maps the name of a parameter or buffer to (segment, innermost call) of each use."""

    learning: set[str] = field(default_factory=set)
    """Parameters used with gradients enabled; others, such as a teacher's under no_grad, get no
    gradient."""

    edited_views: set[str] = field(default_factory=set)
    """Modules that return a view which is changed in place after their call, so that the view loses
    its hooks."""

    changes: dict[str, set[int]] = field(default_factory=dict)
    """Maps the name of a buffer to the segments that change the buffer."""

    draws: dict[int, list[Draw]] = field(default_factory=dict)
    """Random operations of each segment, in order."""

    attributes: dict[Place, AttributeChange] = field(default_factory=dict)
    """Plain attributes that the forward changes."""

    draws_foreign: bool = False
    """True if the forward uses Python's `random` or numpy's global generator."""

    unhooked: set[int] = field(default_factory=set)
    """Segments in which torch allows no saved-tensor hooks: within torch.func.grad and vjp."""

    composed: set[int] = field(default_factory=set)
    """Segments with higher-order operators, which take functions, such as flex attention."""

    cutting_hooks: set[tuple[str, int]] = field(default_factory=set)
    """Modules, each with the index of its forward pre-hook that passes a cut."""

    inputs: InputTrace = field(default_factory=InputTrace)
    in_training: Record | None = None
    """A second record, in training mode, for a model passed in eval mode."""

    output: Any = None
    """The model's output, with None for each value."""

    loss: LossForm = field(default_factory=LossForm)
    """How the model returns its loss."""

    real: bool = False
    """True if the dry run used real tensors, since the model's code depends on values."""

    problem: SplitError | None = None
    num_operations: int = 0
    digest: int = 0
    """Digest of the operations' names, in order."""

    def list_input_traces(self) -> list[InputTrace]:
        return [self.inputs, *([self.in_training.inputs] if self.in_training else [])]

    def is_within(self, call: int | None, stubbed: set[int]) -> bool:
        while call is not None:
            if call in stubbed:
                return True
            call = self.calls[call].parent
        return False


def tensor_names(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter and buffer, keyed by id; a tied one has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return names


def list_results(model: nn.Module) -> dict[int, Any]:
    """Return, by id, replacements for plain attributes that are results of graphs, which torch
    cannot copy. torch.nn.utils.prune and the old weight_norm recompute theirs in each call."""
    held = (value for module in model.modules() for value in vars(module).values())
    results = (value for value in held if isinstance(value, Tensor) and not value.is_leaf)
    return {id(value): value.detach().clone() for value in results}


# Costs of operations.

# Of the order of today's training GPUs; only their ratio moves a cut.
FLOPS_PER_S = 1e14
BYTES_PER_S = 1e12


def count_flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    counter = flop_registry.get(func.overloadpacket)
    if counter is not None:
        return float(counter(*args, **kwargs, out_val=out))
    if "scaled_dot_product" in str(func):  # the CPU's kernels are not in torch's own table
        query, key = args[0], args[1]
        return float(4 * query.numel() * key.shape[-2])
    return 0.0


def is_view(func: Any) -> bool:
    """Return True for an operation that only returns a view of its input."""
    returns = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def list_written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes into.

    Batch norms write their running statistics in training without declaring this; torch 2.13 does
    not increment the version counter either.
    """
    given = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    }
    given |= kwargs
    trains = any(given.get(word) is True for word in ("training", "train"))
    written = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (trains and argument.name.startswith("running_"))
    ]
    return tensors_of(written)


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: untyped
    """Reports each operation: `see` gets its name, `spend` its nominal seconds, `read` its tensors,
    `write` the tensors that it wrote, and `draw` its random draws. `compose` is called for
    operators that take functions, such as flex attention; only such an operator's tensors are
    reported."""

    supports_higher_order_operators = True

    def __init__(
        self,
        spend: Callable[[float], None],
        read: Callable[[list[Tensor]], None],
        write: Callable[[list[Tensor]], None],
        draw: Callable[[Draw], None],
        compose: Callable[[], None],
        see: Callable[[str], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.spend, self.read, self.write, self.draw = spend, read, write, draw
        self.compose, self.see = compose, see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.see(str(func))
        if not hasattr(func, "_schema"):
            self.read(tensors_of((args, kwargs, out)))
            self.compose()
            return out
        drawn = find_drawn(func, args, out) if is_draw(func, args, kwargs) else None
        if drawn is not None:
            shape, stride = tuple(drawn.shape), tuple(drawn.stride())
            self.draw(Draw(name=str(func), shape=shape, stride=stride))
        if not is_view(func):
            touched: list[Tensor] = tensors_of((args, kwargs, out))
            moved = sum(tensor.numel() * tensor.itemsize for tensor in touched)
            self.spend(max(count_flops(func, args, kwargs, out) / FLOPS_PER_S, moved / BYTES_PER_S))
            self.read(touched)
            written = list_written(func, args, kwargs)
            if written:
                self.write(written)
        return out

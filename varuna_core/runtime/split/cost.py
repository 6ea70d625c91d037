"""What the operations of a segment cost, and what they write.

Each operation takes the longer of its arithmetic and its memory traffic on a nominal GPU. The count
is the same on every rank and every run, which times are not: ranks that balance by it agree without
a message. Whoever has measured times (the profiler) gives `costs` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from varuna_core.runtime.comm.values import tensors_of

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
    """An operation that returns another look at its input moves nothing."""
    returns = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def list_written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into.

    Batch norms do not say that they write their running statistics (nor does torch count a version
    of them, 2.13): they do when they train.
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
    """Calls `spend` with the nominal seconds of each operation, and `write` with what it wrote."""

    def __init__(
        self, spend: Callable[[float], None], write: Callable[[list[Tensor]], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.spend, self.write = spend, write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_view(func):
            touched: list[Tensor] = tensors_of((args, kwargs, out))
            moved = sum(tensor.numel() * tensor.itemsize for tensor in touched)
            self.spend(max(count_flops(func, args, kwargs, out) / FLOPS_PER_S, moved / BYTES_PER_S))
            written = list_written(func, args, kwargs)
            if written:
                self.write(written)
        return out

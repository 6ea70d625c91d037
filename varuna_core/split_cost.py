"""What a segment costs, counted from the operations it makes.

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

from varuna_core.split_values import tensors_of

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


class CostMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: untyped
    """Adds the nominal seconds of each operation by calling `add`."""

    def __init__(self, add: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_view(func):
            touched: list[Tensor] = tensors_of((args, kwargs, out))
            moved = sum(tensor.numel() * tensor.itemsize for tensor in touched)
            self.add(max(count_flops(func, args, kwargs, out) / FLOPS_PER_S, moved / BYTES_PER_S))
        return out

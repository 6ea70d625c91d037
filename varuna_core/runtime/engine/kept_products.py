"""Reuse the first forward's matrix products in the recompute: `recompute="selective"`.

```
f   norm ─ product ─ gelu ─ product ─ add       saves only inputs and products
R   norm ─   │    ─ gelu ─   │     ─ add        runs again, with a graph; reuses the products
```

Matrix products take most of a forward's time, and the results between them most of its memory:
norms, activations, dropout, and attention scores, which are products too but larger than their
inputs. A product that the model has since changed in place is recomputed. A product that draws
random numbers is also recomputed, so that later draws are the same.

If the `R` computes other products than the `f`, as in a model that checks if gradients are enabled,
no saved product is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_core.runtime.comm.private_torch import counting_changes
from varuna_core.runtime.comm.values import tensors_of
from varuna_core.runtime.engine.graph_memory import measure_storages
from varuna_core.runtime.split.record import list_written

_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES)
FOR_BACKWARD = "compute_log_sumexp"
BATCHED = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)

Call = tuple[Any, list[Any]]
"""A function, and the types and shapes of its tensors."""


@dataclass(frozen=True)
class KeptProduct:
    result: Any
    versions: list[int]

    @staticmethod
    def of(result: Any) -> KeptProduct:
        result = _detach(result)
        return KeptProduct(result, [tensor._version for tensor in tensors_of(result)])

    @property
    def is_unchanged(self) -> bool:
        return self.versions == [tensor._version for tensor in tensors_of(self.result)]


class KeptProducts:
    """Matrix products kept for one micro-batch on one stage."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """Products of the first forward (`f`), in order."""

        self.results: dict[int, KeptProduct] = {}
        """The saved results, keyed by the index of their call."""

        self.again: list[Call] = []
        """Products of the second forward (`R`)."""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Save the matrix products of the first forward (`f`), which runs within the context."""
        with _Keep(self):
            yield

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Reuse saved products in the recompute (`R`) within the context; then check `is_alike`."""
        with _Serve(self):
            yield
        self.results.clear()

    def list_tensors(self) -> list[Tensor]:
        return [tensor for kept in self.results.values() for tensor in tensors_of(kept.result)]

    @property
    def is_alike(self) -> bool:
        """Return True if the first forward and the recompute computed the same products."""
        return self.calls == self.again


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: untyped
    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, products: KeptProducts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.products = products
        self._places: dict[int, int] = {}
        """Index of each saved result, keyed by its storage."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_product = func in PRODUCTS and not _is_dry(args)
        if is_product:
            args, kwargs = ask_for_backward(func, args, kwargs)
        result = func(*args, **kwargs)
        if is_product:
            if is_worth_keeping(func, args, kwargs, result):
                place = len(self.products.calls)
                self.products.results[place] = KeptProduct.of(result)
                self._places.update(dict.fromkeys(measure_storages(tensors_of(result)), place))
            self.products.calls.append((func, _list_forms(args)))
        elif getattr(getattr(func, "_schema", None), "is_mutable", False):
            # Some changes are not counted, such as that by a bias through `_unsafe_view` (2.13).
            for storage in measure_storages(list_written(func, args, kwargs)):
                self.products.results.pop(self._places.get(storage, -1), None)
        return result


class _Serve(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: untyped
    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, products: KeptProducts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS and not _is_dry(args):
            products, place = self.products, len(self.products.again)
            products.again.append((func, _list_forms(args)))
            kept = products.results.pop(place, None)
            is_same = kept is not None and products.calls[place] == products.again[place]
            if kept is not None and is_same and kept.is_unchanged:
                return _detach(kept.result)
        return func(*args, **(kwargs or {}))


def ask_for_backward(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments that make an attention also return the log-sum-exp that its backward needs;
    on a GPU, attention omits that result if no gradient is requested, as in an `f`."""
    names = [argument.name for argument in func._schema.arguments]
    if FOR_BACKWARD not in names:
        return args, kwargs
    place = names.index(FOR_BACKWARD)
    if place < len(args):
        return (*args[:place], True, *args[place + 1 :]), kwargs
    return args, {**kwargs, FOR_BACKWARD: True}


def is_worth_keeping(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dropout_p"):
        return False
    if func in BATCHED:  # scores
        size: int = result.numel()
        return size <= sum(tensor.numel() for tensor in tensors_of(args))
    return True


def _detach(values: Any) -> Any:
    """Detach tensors, so that they share memory and version counters with the originals."""
    with counting_changes():
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), values)


def _is_dry(args: Any) -> bool:
    """Return True for tensors without values, which DTensor uses to infer shapes once per call."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_of(args))


def _list_forms(args: Any) -> list[Any]:
    return [(type(tensor), *tensor.shape) for tensor in tensors_of(args)]

"""Known defects, to be put back: the machine must find each.

A defect is a name, what it was, the patch that brings the old behaviour back inside the ranks, and
what a draw has that shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from tests.varuna_core.equality import model
from tests.varuna_core.equality.model import HALF_KEPT, Drawn
from tests.varuna_core.equality.spec import STATEFUL, Spec
from varuna_core import varuna
from varuna_core.runtime.comm import links
from varuna_core.runtime.engine import weight_grads
from varuna_core.runtime.engine.graph_offload import SavedGraph
from varuna_core.runtime.engine.loss_seed import LossSeed
from varuna_core.runtime.optim.hooks import ParameterHooks
from varuna_core.runtime.optim.updates import Updates
from varuna_core.runtime.split import random_streams, rehearsal, split
from varuna_core.runtime.split.attributes import KeptAttributes
from varuna_core.runtime.split.inputs import FreshInputs
from varuna_core.runtime.tensor_parallel.draws import ShardedDraws


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One way in which numbers were wrong."""

    what: str
    patch: Callable[[], AbstractContextManager[None]]
    shows: Callable[[Spec], bool]


@contextmanager
def change(place: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, kept)


DEFECTS: dict[str, Defect] = {}


def put_back(name: str) -> AbstractContextManager[None]:
    return DEFECTS[name].patch()


def list_options(spec: Spec) -> dict[str, Any]:
    """Arguments of Varuna that the model needs to be what it is in plain half precision."""
    if spec.precision == "fp32":
        return {}
    kept = ["more." * spec.nested + name for name in HALF_KEPT if spec.has(name)]
    return {"keep_fp32": [*kept, *spec.list_kept()]}


# The defects.


@contextmanager
def change_inputs_in_place() -> Iterator[None]:
    def make(self: FreshInputs, given: Any) -> Any:
        return given

    with (
        change(FreshInputs, "make", make),
        change(varuna, "refuse_unforeseen", lambda noted: None),
        change(split, "refuse_unseen_changes", lambda *args: None),
    ):
        yield


@contextmanager
def leave_hooks_of_half() -> Iterator[None]:
    real = ParameterHooks.run_before

    def run_before(self: ParameterHooks) -> None:
        if all(place is parameter for parameter, place in self.masters.list_places()):
            real(self)

    with change(ParameterHooks, "run_before", run_before):
        yield


@contextmanager
def round_weights() -> Iterator[None]:
    real = LossSeed.__init__

    def start(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **{**options, "split": None})

    with change(LossSeed, "__init__", start):
        yield


@contextmanager
def repeat_masks() -> Iterator[None]:
    @contextmanager
    def running(self: ShardedDraws) -> Iterator[None]:
        yield

    with change(ShardedDraws, "running", running):
        yield


@contextmanager
def cast_all() -> Iterator[None]:
    with change(sys.modules[__name__], "list_options", lambda spec: {}):
        yield


@contextmanager
def mean_means() -> Iterator[None]:
    with change(model, "choose_kind", lambda spec: model.MeanOfMeans if spec.tokens else Drawn):
        yield


@contextmanager
def limit_to_torchs() -> Iterator[None]:
    def to_timeout(patience_s: float | None) -> timedelta | None:
        return None if patience_s is None else timedelta(seconds=patience_s)

    with change(links, "to_timeout", to_timeout):
        yield


@contextmanager
def leave_attributes() -> Iterator[None]:
    with change(KeptAttributes, "restore", lambda self: None):
        yield


@contextmanager
def leave_foreign_streams() -> Iterator[None]:
    with change(random_streams, "seed_foreign_streams", lambda derived: None):
        yield


@contextmanager
def read_computed_weights() -> Iterator[None]:
    def is_linear(module: Any) -> bool:
        return type(module).forward is nn.Linear.forward and module.weight is not None

    with change(weight_grads, "_is_linear", is_linear):
        yield


@contextmanager
def split_all_linears() -> Iterator[None]:
    def may_split(self: Any, input: Any, weight: Any, bias: Any) -> bool:
        return torch.is_grad_enabled()

    with change(weight_grads._LinearForward, "_may_split", may_split):
        yield


@contextmanager
def make_rows() -> Iterator[None]:
    def make(grad: Any, input: Any, weight: Any) -> Any:
        return grad @ weight

    with change(weight_grads, "_make_input_grad", make):
        yield


@contextmanager
def close_in_children() -> Iterator[None]:
    with change(links.Links, "_is_ours", lambda self: True):
        yield


@contextmanager
def keep_results() -> Iterator[None]:
    with change(rehearsal, "list_results", lambda model: {}):
        yield


@contextmanager
def hook_all_graphs() -> Iterator[None]:
    with change(rehearsal, "may_hook_saved", lambda: True):
        yield


@contextmanager
def take_last_optimizer() -> Iterator[None]:
    real = Updates.attach

    def attach(self: Updates, optimizers: Any, loss_scale: Any) -> None:
        real(self, optimizers[-1:], loss_scale)

    with change(Updates, "attach", attach):
        yield


@contextmanager
def keep_selective() -> Iterator[None]:
    with change(rehearsal.Rehearsal, "_note_composed", lambda self: None):
        yield


@contextmanager
def offload_nested() -> Iterator[None]:
    real = SavedGraph._take

    def take(self: SavedGraph, tensor: Any) -> Any:
        return self._take_parts(tensor) if tensor.is_nested else real(self, tensor)

    with change(SavedGraph, "_take", take):
        yield


DEFECTS |= {
    "complex_linear": Defect(
        what="linear layers of complex numbers, and within vmap and jvp, go the fast way",
        patch=split_all_linears,
        shows=lambda spec: spec.has("complex", "mapped", "pushed", "inner_grad"),
    ),
    "row_gradients": Defect(
        what="the gradient of a layer's input has another memory order than torch's",
        patch=make_rows,
        shows=lambda spec: spec.has("norm2d") and spec.precision != "fp32",
    ),
    "forked_child": Defect(
        what="a forked child that ends closes its parent's channels",
        patch=close_in_children,
        shows=lambda spec: spec.forks,
    ),
    "computed_attributes": Defect(
        what="a model with pruned or normed weights cannot be copied",
        patch=keep_results,
        shows=lambda spec: spec.has("pruned", "old_norm"),
    ),
    "hooked_graphs": Defect(
        what="graphs within torch.func.grad are measured and offloaded",
        patch=hook_all_graphs,
        shows=lambda spec: spec.has("inner_grad"),
    ),
    "one_optimizer": Defect(
        what="of several optimizers the last one counts",
        patch=take_last_optimizer,
        shows=lambda spec: spec.optimizer == "several" and spec.other is not None,
    ),
    "selective_flex": Defect(
        what="flex attention is watched while its products are kept",
        patch=keep_selective,
        shows=lambda spec: spec.has("flex") and spec.layout.recompute == "selective",
    ),
    "offloaded_nested": Defect(
        what="nested tensors are offloaded, and come back of another ragged size",
        patch=offload_nested,
        shows=lambda spec: spec.has("ragged") and spec.layout.recompute == "offload",
    ),
    "attributes": Defect(
        what="checks and recomputes leave plain attributes of modules changed",
        patch=leave_attributes,
        shows=lambda spec: spec.has(*STATEFUL),
    ),
    "foreign_streams": Defect(
        what="Python's and numpy's streams depend on the layout, and a recompute draws anew",
        patch=leave_foreign_streams,
        shows=lambda spec: spec.has("foreign"),
    ),
    "computed_weights": Defect(
        what="making the stages reads computed weights, which changes them",
        patch=read_computed_weights,
        shows=lambda spec: spec.has("spectral"),
    ),
    "inputs_in_place": Defect(
        what="inputs changed in place under recompute, and in several stages",
        patch=change_inputs_in_place,
        shows=lambda spec: spec.has("frac_in_place"),
    ),
    "hooks_in_half": Defect(
        what="hooks on parameters are silent in half precision",
        patch=leave_hooks_of_half,
        shows=lambda spec: spec.hooks is not None and spec.precision != "fp32",
    ),
    "rounded_weights": Defect(
        what="the weight of a micro-batch is rounded to half precision",
        patch=round_weights,
        shows=lambda spec: spec.precision != "fp32" and not spec.full_loss,
    ),
    "cast_inputs": Defect(
        what="all fractions among the inputs are cast to half precision",
        patch=cast_all,
        shows=lambda spec: spec.has("time") and spec.precision != "fp32",
    ),
    "time_limits": Defect(
        what="collectives have torch's half hour where no limit was stated",
        patch=limit_to_torchs,
        shows=lambda spec: spec.layout.data > 1 and spec.layout.hang_timeout_s is None,
    ),
    "repeated_masks": Defect(
        what="dropout repeats one mask on every share of a layer",
        patch=repeat_masks,
        shows=lambda spec: spec.layout.tensor > 1 and spec.has("mlp_dropout"),
    ),
    "mean_of_means": Defect(
        what="a mean over tokens is taken by micro-batch",
        patch=mean_means,
        shows=lambda spec: spec.tokens,
    ),
}

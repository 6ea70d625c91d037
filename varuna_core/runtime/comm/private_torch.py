"""Wrap private names of torch whose use takes more than a single call.

tests/varuna_core/runtime/comm/private_names.py lists every private name that varuna_core uses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Return True inside torch.func transforms and forward-mode differentiation, which do not
    support a Function without `setup_context` and `jvp`."""
    within_func: bool = torch._C._are_functorch_transforms_active()
    return within_func or forward_ad._current_level >= 0


def may_hook_saved() -> bool:
    """Return False in torch.func.grad, vjp, jacrev and hessian, which allow no tensor hooks."""
    autograd: Any = torch._C._autograd
    allowed: bool = autograd._saved_tensors_hooks_is_enabled()
    return allowed


class Use(Enum):
    """How the backward pass that is running uses the gradient of a weight."""

    ADDED = "the gradient is added to the weight's `grad`"
    RETURNED = "the gradient is returned by `torch.autograd.grad`"
    NONE = "no gradient is needed: a forward requests the gradient of an activation"


def read_use(accumulate: Any) -> Use:
    """Return how a weight's gradient is used; `accumulate` is its AccumulateGrad node."""
    try:
        return Use.ADDED if torch._C._will_engine_execute_node(accumulate) else Use.NONE
    except RuntimeError:  # torch does not answer where gradients of leaves are returned
        return Use.RETURNED


def counting_changes() -> AbstractContextManager[Any]:
    """Return a context in which detached tensors share the original's version counter, also below
    autograd; torch's selective checkpointing uses the same guard."""
    guard: Any = torch._C._SetExcludeDispatchKeyGuard
    made: AbstractContextManager[Any] = guard(torch._C.DispatchKey.ADInplaceOrView, False)
    return made

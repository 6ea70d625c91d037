"""take_plain: the user's own model, out of what torch wraps around it.

A wrapper's names (`_orig_mod.`, `module.`) would be those of checkpoints, and what it does to a
forward or to gradients is Varuna's matter here. torch.compile's and both data-parallel wrappers
around the whole model come off; within it they are refused by name.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn

from varuna_core.runtime.split.cut import SplitError

log = logging.getLogger(__name__)

WRAPPERS = {
    "torch.compile": ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    "DistributedDataParallel": ("torch.nn.parallel", "DistributedDataParallel", "module"),
    "DataParallel": ("torch.nn.parallel", "DataParallel", "module"),
}
"""Each wrapper's module, class and attribute of the model in it."""

SHARDED = {
    "FullyShardedDataParallel": ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    "fully_shard": ("torch.distributed.fsdp", "FSDPModule"),
}


def take_plain(model: Any) -> Any:
    """The model within its wrappers, or an error that names the one that cannot be taken off."""
    while kind := _find_wrapper(model):
        model = getattr(model, WRAPPERS[kind][2])
        log.warning("the model is taken out of %s", kind)
    if not isinstance(model, nn.Module):
        raise TypeError(f"Varuna takes a torch.nn.Module, not {model!r:.80}")
    for name, module in model.named_modules():
        shown = f"module {name!r}" if name else "the model"
        if kind := _find_wrapper(module):
            raise SplitError(
                f"{shown} is wrapped by {kind}: give Varuna the model without it"
                + (", and say compile= there" if kind == "torch.compile" else "")
            )
        for kind, (place, word) in SHARDED.items():
            if _is_a(module, place, word):
                raise SplitError(
                    f"{shown} is sharded by {kind}: give Varuna the model as it was before, and "
                    "say zero=1, 2 or 3 to share weights over replicas"
                )
        if getattr(module, "_compiled_call_impl", None) is not None:
            log.warning(
                "%s was compiled in place; its copy in a stage is not: say compile=True", shown
            )
    return model


def _find_wrapper(module: Any) -> str:
    return next(
        (kind for kind, (place, word, _) in WRAPPERS.items() if _is_a(module, place, word)), ""
    )


def _is_a(module: Any, place: str, word: str) -> bool:
    """What nobody has imported has wrapped nothing; torch's compiler takes a second to load."""
    kind = getattr(sys.modules.get(place), word, None)
    return kind is not None and isinstance(module, kind)

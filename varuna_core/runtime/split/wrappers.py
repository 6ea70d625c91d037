"""Remove torch's wrappers from a model, and add a script's loss function.

    model = with_loss(ResNet(), nn.CrossEntropyLoss())
    model(images, target)     # {"loss": ..., "output": ...}, as a stage must compute both
    model(images)             # the plain model's output

A pipeline's last stage computes the loss, so the model that is cut must contain the loss function.
The parameters' names stay those of the plain model.

A wrapper's name prefixes (`_orig_mod.`, `module.`) would appear in checkpoints, and Varuna itself
does what the wrapper does to forwards and gradients. So the wrappers of torch.compile and of both
kinds of data parallelism are removed from the whole model; wrappers of submodules raise an error.
"""

from __future__ import annotations

import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from varuna_core.runtime.split.cut import SplitError

log = logging.getLogger(__name__)

WRAPPERS = {
    "torch.compile": ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    "DistributedDataParallel": ("torch.nn.parallel", "DistributedDataParallel", "module"),
    "DataParallel": ("torch.nn.parallel", "DataParallel", "module"),
}
"""Module, class and attribute of the wrapped model, for each wrapper."""

SHARDED = {
    "FullyShardedDataParallel": ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    "fully_shard": ("torch.distributed.fsdp", "FSDPModule"),
}


def take_plain(model: Any) -> Any:
    """Return the model without its wrappers; raise an error if one cannot be removed."""
    while kind := _find_wrapper(model):
        model = getattr(model, WRAPPERS[kind][2])
        log.warning("the wrapper %s is removed from the model", kind)
    if not isinstance(model, nn.Module):
        raise TypeError(f"Varuna takes a torch.nn.Module, not {model!r:.80}")
    for name, module in model.named_modules():
        shown = f"module {name!r}" if name else "the model"
        if kind := _find_wrapper(module):
            raise SplitError(
                f"{shown} is wrapped by {kind}: pass Varuna the unwrapped model"
                + (", and set compile= in Options" if kind == "torch.compile" else "")
            )
        for kind, (place, word) in SHARDED.items():
            if _is_a(module, place, word):
                raise SplitError(
                    f"{shown} is sharded by {kind}: pass Varuna the unsharded model, and set "
                    "zero=1, 2 or 3 to shard over replicas"
                )
        if getattr(module, "_compiled_call_impl", None) is not None:
            log.warning(
                "%s was compiled in place, but its copy in a stage is not: pass compile=True",
                shown,
            )
    return model


def _find_wrapper(module: Any) -> str:
    return next(
        (kind for kind, (place, word, _) in WRAPPERS.items() if _is_a(module, place, word)), ""
    )


def _is_a(module: Any, place: str, word: str) -> bool:
    """Return True if `module` is an instance of the class `word` of the Python module `place`,
    which is not imported for this."""
    kind = getattr(sys.modules.get(place), word, None)
    return kind is not None and isinstance(module, kind)


# A criterion.

M = TypeVar("M", bound=nn.Module)
CRITERION = "criterion"


def with_loss(model: M, criterion: Callable[[Any, Any], Tensor], target: str = "target") -> M:
    """Make the model take `target` after its own inputs and return its output with the loss
    `criterion(output, target)`, a mean over the samples; return the same model."""
    model = take_plain(model)
    plain = type(model)
    signature = inspect.signature(plain.forward)
    if hasattr(model, CRITERION) or target in signature.parameters:
        raise SplitError(
            f"this {plain.__name__} already has {CRITERION!r} or an input {target!r}: choose "
            "another name with with_loss(model, criterion, target=NAME)"
        )

    def forward(self: nn.Module, *args: Any, **by_name: Any) -> Any:
        bound = taken.bind(self, *args, **by_name)
        wanted = bound.arguments.pop(target, None)
        output = plain.forward(*bound.args, **bound.kwargs)
        if wanted is None:
            return output
        return {"loss": getattr(self, CRITERION)(output, wanted), "output": output}

    taken = _add_input(signature, target)
    forward.__signature__ = taken  # type: ignore[attr-defined]  # read by inspect.signature
    body = {"forward": forward, "__module__": plain.__module__}
    model.__class__ = types.new_class(
        plain.__name__, (plain,), exec_body=lambda own: own.update(body)
    )
    if isinstance(criterion, nn.Module) and criterion.state_dict():
        setattr(model, CRITERION, criterion)  # its weights are a stage's
    else:
        model.__dict__[CRITERION] = criterion  # an nn.Sequential would call what it has as a module
    return model


def _add_input(signature: inspect.Signature, name: str) -> inspect.Signature:
    """Return the signature with one more input, after all others that may be positional."""
    kinds = inspect.Parameter
    known = [*signature.parameters.values()]
    is_open = any(each.kind is kinds.VAR_POSITIONAL for each in known)
    kind = kinds.KEYWORD_ONLY if is_open else kinds.POSITIONAL_OR_KEYWORD
    behind = (kinds.VAR_KEYWORD,) if is_open else (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)
    place = next((at for at, each in enumerate(known) if each.kind in behind), len(known))
    known.insert(place, kinds(name, kind, default=None))
    return signature.replace(parameters=known)

"""with_loss: a model and the criterion that its script keeps outside it, as one model.

    model = with_loss(ResNet(), nn.CrossEntropyLoss())
    model(images, target)     # {"loss": ..., "output": ...}, as a stage must compute both
    model(images)             # the plain model's output

A pipeline's last stage makes the loss, so the model that is cut must have it. The names of
parameters stay the plain model's.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.wrappers import take_plain

M = TypeVar("M", bound=nn.Module)
CRITERION = "criterion"


def with_loss(model: M, criterion: Callable[[Any, Any], Tensor], target: str = "target") -> M:
    """The same model, which takes `target` too, after its own inputs, and then returns its output
    with the loss: `criterion(output, target)`, a mean over the samples."""
    model = take_plain(model)
    plain = type(model)
    signature = inspect.signature(plain.forward)
    if hasattr(model, CRITERION) or target in signature.parameters:
        raise SplitError(
            f"this {plain.__name__} has {CRITERION!r}, or an input {target!r}, already: "
            "with_loss(model, criterion, target=NAME) names the new input"
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
    """With one more input: the last that may be given by its place."""
    kinds = inspect.Parameter
    known = [*signature.parameters.values()]
    is_open = any(each.kind is kinds.VAR_POSITIONAL for each in known)
    kind = kinds.KEYWORD_ONLY if is_open else kinds.POSITIONAL_OR_KEYWORD
    behind = (kinds.VAR_KEYWORD,) if is_open else (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)
    place = next((at for at, each in enumerate(known) if each.kind in behind), len(known))
    known.insert(place, kinds(name, kind, default=None))
    return signature.replace(parameters=known)

"""Provide a view of the user's model on this rank, to call the methods of the user's own class.

    optimizer = model.module.configure_optimizers(weight_decay, lr)

The view is a tree of objects of the user's classes. Its parameters are only this rank's masters;
its buffers and plain attributes are those of the rank's stages, so that a method that sets
`self.rate = 0.5` affects the forward. Methods that run the model, or move, copy or load weights,
raise an error that names the method to call instead.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from torch import Tensor, nn

RUNS = (
    "runs the whole model, but this rank holds only its stages: call step(inputs) or "
    "evaluate(inputs) of Varuna, or Varuna itself under torch.no_grad()"
)
GENERATES = (
    "runs the whole model many times, but this rank holds only its stages: load "
    "gather_state_dict() into the plain model, and generate with it"
)
MOVES = "cannot move or cast weights: set device= and precision= of Varuna instead"
LOADS = "loads the whole model: pass the state dict to Varuna as options=Options(state_dict=...)"
COPIES = "would copy only a part of the model: call gather_state_dict() for all weights"
HOOKS = "would put a hook on only a part of the model: register hooks before you create Varuna"
REFUSED = {
    "forward": RUNS,
    "__call__": RUNS,
    "generate": GENERATES,
    "_apply": MOVES,
    "load_state_dict": LOADS,
    "__reduce_ex__": COPIES,
    "__deepcopy__": COPIES,
    "register_forward_hook": HOOKS,
    "register_forward_pre_hook": HOOKS,
    "register_full_backward_hook": HOOKS,
    "register_full_backward_pre_hook": HOOKS,
}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The rank and module behind a view."""

    path: str
    parts: Sequence[nn.Module]
    """The modules of this name in the rank's stages."""

    buffers: Mapping[str, nn.Module]
    """For each of the rank's own buffers, by name, the module that holds it."""


class _View:
    """Base class of views, before the user's class; looks up attributes in the rank's stages."""

    _source: _Source
    __dict__: dict[str, Any]

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name == "_buffers":
            return {word: part._buffers[word] for word, part in own["_source"].buffers.items()}
        if name in own:
            return own[name]
        state = vars(own["_source"].parts[0])
        return state[name] if name in state else super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        source = self._source
        if name in source.buffers:
            return source.buffers[name]._buffers[name]
        try:
            return super().__getattr__(name)  # type: ignore[misc]  # the user's class has one
        except AttributeError:
            first = source.parts[0]
            if name in first._parameters or name in first._buffers:
                shown = f"{source.path}.{name}".lstrip(".")
                raise AttributeError(
                    f"{shown!r} is not on this rank: it belongs to another stage, or to another "
                    "replica (ZeRO)"
                ) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        source = self._source
        first = source.parts[0]
        known = (first._parameters, first._buffers, first._modules)
        if isinstance(value, (Tensor, nn.Module)) or any(name in held for held in known):
            raise AttributeError(
                f"model.module.{name} cannot be set: set weights, buffers and modules before you "
                "create Varuna"
            )
        for part in source.parts:
            setattr(part, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"model.module.{name} cannot be deleted: change the model before you create Varuna"
        )


def _refuse(name: str, reason: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"model.module: {name} {reason}")

    return refuse


def _save_pretrained(self: Any, *args: Any, state_dict: Any = None, **options: Any) -> Any:
    """Call Hugging Face's `save_pretrained`, but refuse it without the weights of all ranks."""
    if state_dict is None:
        raise RuntimeError(
            "model.module: save_pretrained would write only this rank's part: call "
            "model.gather_state_dict() on all ranks, and pass rank 0's result as state_dict="
        )
    return super(type(self), self).save_pretrained(*args, state_dict=state_dict, **options)


@cache
def _make_class(kind: type) -> type:
    """Return a subclass of `kind` for views. Of the methods in REFUSED, the subclass refuses only
    those that `kind` has."""
    body = {name: _refuse(name, why) for name, why in REFUSED.items() if hasattr(kind, name)}
    if hasattr(kind, "save_pretrained"):
        body["save_pretrained"] = _save_pretrained
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (_View, kind), exec_body=lambda own: own.update(body))


def view_model(
    modules: Sequence[nn.Module],
    masters: Mapping[str, nn.Parameter],
    buffers: Sequence[Mapping[str, Tensor]],
    nothing: nn.Parameter,
) -> Any:
    """Return the view of a rank with these stages' modules; `buffers` lists each stage's buffers.

    `nothing` is used if the rank has no master to train, since optimizers need a parameter.
    """
    owners = {name: at for at, held in enumerate(buffers) for name in held}
    made: dict[int, Any] = {}

    def view(path: str, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if id(first) in made:
            return made[id(first)]
        dot = f"{path}." if path else ""
        kind: Any = type(first)
        found: Any = object.__new__(_make_class(kind))
        made[id(first)] = found
        parameters = {
            name: None if held is None else masters[dot + name]
            for name, held in first._parameters.items()
            if held is None or dot + name in masters
        }
        if not path and not any(master.requires_grad for master in masters.values()):
            parameters["nothing"] = nothing
        object.__getattribute__(found, "__dict__").update(
            _parameters=parameters,
            _buffers={},
            _modules={
                name: child
                if child is None
                else view(dot + name, [p._modules[name] for p in parts])
                for name, child in first._modules.items()
            },
            _source=_Source(
                path=path,
                parts=parts,
                buffers={n: parts[owners[dot + n]] for n in first._buffers if dot + n in owners},
            ),
        )
        return found

    return view("", modules)

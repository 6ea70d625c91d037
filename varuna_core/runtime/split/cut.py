"""Define CutPoint, which marks where a model may be cut, and the watchers of a running forward.

A CutPoint stores neither its number nor its stage. A dry run or a stage watches the calls, and the
k-th call in a forward is cut k; so CutPoints in a plain list, or captured by a hook or a closure,
work like registered ones. Without a watcher, a CutPoint is the identity.

    segment 0 | cut 0 | segment 1 | cut 1 | ... | cut n-1 | segment n
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, Protocol, TypeVar, overload

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class SplitError(ValueError):
    """Raised if the model cannot be split as requested; the message gives reason and remedy."""


class LeakError(SplitError):
    """Raised if a value reaches a stage without passing through its cut."""


class StageEnd(BaseException):
    """Raised to leave a forward at a stage's last cut; `except Exception` does not catch it."""


class Watcher(Protocol):
    """Interface of objects that are notified of every CutPoint that a forward passes."""

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        """Return the value that the CutPoint's call is to return."""


M = TypeVar("M", bound=nn.Module)
_running = threading.local()


def watch(watcher: Watcher | None) -> Watcher | None:
    """Install `watcher` for CutPoints called in this thread; return the previous watcher."""
    before: Watcher | None = getattr(_running, "watcher", None)
    _running.watcher = watcher
    return before


def unpack(values: tuple[Any, ...]) -> Any:
    """Return a CutPoint's result for these values: a single value, or the tuple."""
    return values[0] if len(values) == 1 else values


class CutPoint(nn.Module):
    """Marks a possible cut: `x = cut(x)` or `x, mask = cut(x, mask)`.

    The values may be tensors of any dtype, None, numbers and strings, and tuples, lists and dicts
    of these. Call each CutPoint once per forward.
    """

    is_repeated = False
    """True if the CutPoint may be called several times in a forward; each call is then a cut."""

    def forward(self, *values: Any) -> Any:
        watcher: Watcher | None = getattr(_running, "watcher", None)
        if watcher is None:
            return unpack(values)
        return watcher.pass_cut(self, values)

    def __call__(self, *values: Any) -> Any:
        # A passive cut is passed for each layer before a stage: no hooks, no module call.
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*values)
        return self.forward(*values)


@overload
def cut_before(model: M, pattern: str, /, *patterns: str, carry: Sequence[str] = ()) -> M: ...


@overload
def cut_before(*modules: nn.Module, carry: Sequence[str] = ()) -> None: ...


def cut_before(*places: Any, carry: Sequence[str] = ()) -> Any:
    """Insert a CutPoint before modules of a model, without changing the model's code.

        model = cut_before(model, "transformer.h.*", "transformer.ln_f")
        cut_before(model.transformer.h, model.transformer.ln_f)

    Pass the model, which is returned, and patterns of module names: as in file names, `*` and `?`
    match any characters and `[12]` one of those listed, but no wildcard matches a dot. A pattern
    that matches no module is an error. Or pass the modules themselves. An `nn.ModuleList` or
    `nn.ModuleDict` stands for each of its elements.

    The module's first argument passes through the cut, as do those parameters of its forward that
    `carry` names: `carry=["encoder_hidden_states"]` if each decoder layer gets the encoder's
    output. All other arguments must depend only on the model's inputs. A module that is called
    several times in a forward has a cut before each call.
    """
    names = (carry,) if isinstance(carry, str) else tuple(carry)
    if any(isinstance(place, str) for place in places):
        model, *patterns = places
        found = {id(m): m for pattern in patterns for m in find_modules(model, pattern)}
        _cut_each(found.values(), names)
        return model
    _cut_each(places, names)
    return None


def _cut_each(places: Iterable[Any], carry: tuple[str, ...]) -> None:
    modules = [*_list_modules(places)]
    taken = {name for module in modules for name in signature(module.forward).parameters}
    for name in carry:
        if name not in taken:
            raise SplitError(
                f"carry has {name!r}, but the modules' inputs are {', '.join(sorted(taken))}"
            )
    for module in modules:
        if hasattr(module, _CUT):
            raise SplitError(f"a cut already exists before this {type(module).__name__}")
        setattr(module, _CUT, CutBefore(carry))
        module.register_forward_pre_hook(enter_cut, with_kwargs=True)


def _list_modules(places: Iterable[Any]) -> Iterator[nn.Module]:
    for place in places:
        if isinstance(place, (nn.ModuleList, nn.ModuleDict)):
            yield from _list_modules(place.children())
        elif isinstance(place, nn.Module):
            yield place
        else:
            raise TypeError(f"cut_before takes modules of the model, not {place!r:.80}")


def find_modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules whose names match a pattern, or raise an error with suggestions."""
    if not isinstance(model, nn.Module) or not isinstance(pattern, str):
        raise TypeError(
            "cut_before takes modules, or a model and then patterns of names: "
            'cut_before(model, "transformer.h.*")'
        )
    while [name for name, _ in model.named_children()] in WRAPPED:
        model = next(model.children())
    named = {name: module for name, module in model.named_modules() if name}
    words = pattern.split(".")
    found = [module for name, module in named.items() if _matches(name.split("."), words)]
    if not found:
        raise SplitError(
            f"no module of this {type(model).__name__} matches {pattern!r}: "
            f"{_suggest(named, words)}"
        )
    return found


def _matches(parts: Sequence[str], words: Sequence[str]) -> bool:
    return len(parts) == len(words) and all(map(fnmatchcase, parts, words))


def _suggest(named: Mapping[str, nn.Module], words: Sequence[str]) -> str:
    """Suggest containers of the model as patterns: similar names if any, else its children."""
    lists = {
        f"{name}.*": f"{len(module)} of {type(next(module.children())).__name__}"
        for name, module in named.items()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
    }
    near = [name for name in lists if _matches(name.split(".")[-len(words) :], words)]
    near = near or get_close_matches(".".join(words), lists, 4)
    chosen = [name for name in lists if name in near or not near]
    if chosen:
        shown = ", ".join(f"{name!r} ({lists[name]})" for name in chosen[:4])
        return f"there {'is' if len(chosen) == 1 else 'are'} {shown}"
    children = [name for name in named if "." not in name]
    return f"there are {', '.join(map(repr, children[:8])) or 'none'}"


class CutBefore(CutPoint):
    """A CutPoint before a module that may be called several times in a forward."""

    is_repeated = True

    def __init__(self, carry: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.carry = carry
        """Parameters of the module's forward, besides the first, that pass through the cut."""


CROSSED: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
"""For tensors with which modules after a cut are called, the tensors that the stage received
instead: a loop passes the same tensor to all later modules."""
_CUT = "cut_before_this"
WRAPPED = (["_orig_mod"], ["module"])
"""Child names in torch's wrappers of compiled and data-parallel models, which Varuna removes."""


def enter_cut(
    module: nn.Module, args: tuple[Any, ...], by_name: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook that passes the first argument, positional or by name, through the cut."""
    cut: CutBefore = getattr(module, _CUT)
    if cut.carry:
        bound = signature(module.forward).bind(*args, **by_name)
        names = [next(iter(bound.arguments)), *(n for n in cut.carry if n in bound.arguments)]
        given = [bound.arguments[name] for name in names]
        passed = cut(*map(find_crossed, given))
        for name, old, new in zip(
            names, given, passed if len(names) > 1 else [passed], strict=True
        ):
            bound.arguments[name] = new
            if isinstance(old, Tensor) and new is not old:
                CROSSED[old] = new
        return bound.args, bound.kwargs
    if args:
        return (cut(args[0]), *args[1:]), by_name
    if not by_name:
        raise SplitError(f"a {type(module).__name__} after a cut was called without arguments")
    first = next(iter(by_name))
    return args, {**by_name, first: cut(by_name[first])}


def find_crossed(value: Any) -> Any:
    """Return the value that the running stage received instead of a tensor, or the value itself."""
    return CROSSED.get(value, value) if isinstance(value, Tensor) else value

"""CutPoint: the mark in a model where it may be cut, and the watchers of a running forward.

A CutPoint knows neither its number nor its stage. Whoever runs the model (a dry run, a stage)
watches the calls, and the k-th call of a forward is cut k; so CutPoints in a plain list, and those
captured by a hook or a closure, work like registered ones. Unwatched, a CutPoint is the identity.

    segment 0 | cut 0 | segment 1 | cut 1 | ... | cut n-1 | segment n
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, Protocol, TypeVar, overload

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class SplitError(ValueError):
    """Raised if the model cannot be split this way; the message says why and what to do."""


class LeakError(SplitError):
    """Raised if a value reaches a stage around its cut."""


class StageEnd(BaseException):
    """Raised to leave a forward at a stage's last cut; `except Exception` does not catch it."""


class Watcher(Protocol):
    """Called at every CutPoint that a forward passes."""

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        """Return what the CutPoint returns."""


M = TypeVar("M", bound=nn.Module)
_running = threading.local()


def watch(watcher: Watcher | None) -> Watcher | None:
    """Install `watcher` for the CutPoints that this thread passes; return the previous one."""
    before: Watcher | None = getattr(_running, "watcher", None)
    _running.watcher = watcher
    return before


def unpack(values: tuple[Any, ...]) -> Any:
    """Return what a CutPoint called with these values returns."""
    return values[0] if len(values) == 1 else values


class CutPoint(nn.Module):
    """Marks a possible cut: `x = cut(x)` or `x, mask = cut(x, mask)`.

    What goes through may be tensors of any type, None, numbers and strings, and tuples, lists and
    dicts of these. Each CutPoint is passed once a forward.
    """

    is_repeated = False
    """True if the CutPoint may be passed several times in a forward; each time is then a cut."""

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
    """Put a CutPoint before modules of a model, without a change of the model's code.

        model = cut_before(model, "transformer.h.*", "transformer.ln_f")
        cut_before(model.transformer.h, model.transformer.ln_f)

    By patterns of module names, after the model, which is returned: in each part between dots `*`
    and `?` stand for any letters and `[12]` for one of these, as in file names; a `*` never
    reaches over a dot. A pattern without any module is refused. Or by the modules themselves. Of
    an `nn.ModuleList` or `nn.ModuleDict` each element is meant.

    What passes the cut is the module's first argument, and those of its others that `carry` names,
    as its forward does: `carry=["encoder_hidden_states"]` where each layer of a decoder is handed
    what the encoder made. What else goes to the module must come from the inputs
    alone. A module that is called several times in a forward has a cut before each call.
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
            raise SplitError(f"carry names {name!r}; these modules take {', '.join(sorted(taken))}")
    for module in modules:
        if hasattr(module, _CUT):
            raise SplitError(f"there is a cut before this {type(module).__name__} already")
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
    """Return the modules whose dotted names match a pattern; if none does, the error suggests
    some."""
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
            f"no module of this {type(model).__name__} is called {pattern!r}: "
            f"{_suggest(named, words)}"
        )
    return found


def _matches(parts: Sequence[str], words: Sequence[str]) -> bool:
    return len(parts) == len(words) and all(map(fnmatchcase, parts, words))


def _suggest(named: Mapping[str, nn.Module], words: Sequence[str]) -> str:
    """Suggest containers of the model as patterns, similar ones if any, or its children."""
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
    """A CutPoint before a module, which may be called several times in a forward (shared
    layers)."""

    is_repeated = True

    def __init__(self, carry: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.carry = carry
        """Parameters of the module's forward, besides the first, whose values pass the cut."""


CROSSED: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
"""By a tensor that modules after a cut are called with, what the stage received instead. A loop
passes the same tensor to all later modules."""
_CUT = "cut_before_this"
WRAPPED = (["_orig_mod"], ["module"])
"""Child names in torch's wrappers of compiled and data-parallel models, which Varuna removes."""


def enter_cut(
    module: nn.Module, args: tuple[Any, ...], by_name: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook that passes the first argument, by position or name, through the cut."""
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
        raise SplitError(f"a {type(module).__name__} after a cut is called without arguments")
    first = next(iter(by_name))
    return args, {**by_name, first: cut(by_name[first])}


def find_crossed(value: Any) -> Any:
    """Return the value that the running stage received instead of a tensor, or the value itself."""
    return CROSSED.get(value, value) if isinstance(value, Tensor) else value


class _Announcer:
    def __init__(self, on_segment: Callable[[int], None]) -> None:
        self.on_segment, self.segment = on_segment, 0

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        self.segment += 1
        self.on_segment(self.segment)
        return unpack(values)


@contextmanager
def announce_segments(on_segment: Callable[[int], None]) -> Iterator[None]:
    """Call `on_segment(k)` when a forward of a whole model enters segment k, to seed or time it."""
    before = watch(_Announcer(on_segment))
    try:
        on_segment(0)
        yield
    finally:
        watch(before)

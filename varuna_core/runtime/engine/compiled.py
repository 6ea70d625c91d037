"""Apply torch.compile to the modules of a stage: `Options(compile=True)`.

    the model's forward, cuts, stubs      not compiled
    blocks.0   blocks.1   ...             forwards compiled, one graph for all blocks of a class

The largest modules within one segment are compiled; for a container with several blocks of one
class, each block is compiled instead. A module that draws random numbers is skipped, since its
compiled form would draw other numbers (submodules that draw none are compiled), and so is a module
with hooks on its submodules. A forward is compiled entirely or not at all, so a failed one has no
effect.

Layers in a compiled module do not postpone their weight gradients (weight_grads.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from varuna_core.runtime.split.cut import CutPoint
from varuna_core.runtime.split.kept import narrow, widen
from varuna_core.runtime.split.record import Record
from varuna_core.runtime.split.stage import Stage

log = logging.getLogger(__name__)

NUM_SHOWN = 4
"""Maximum number of module names in a log line."""

# What is to be compiled.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A stage's modules to compile, by name."""

    taken: tuple[str, ...]
    left: Mapping[str, str]
    """Modules that are not compiled, each with the reason."""


def choose_modules(stage: Stage) -> Choice:
    """Choose the modules of a stage that may be compiled."""
    within, drawing = find_within(stage.record, stage.segments), find_drawing(stage.record)
    taken: list[str] = []
    left: dict[str, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        if name in within and name not in stage.stubs and _is_worth(module):
            reason = _why_not(name, module, stage.stubs, drawing)
            if not reason and not _has_blocks(module):
                taken.append(name)
                return
            if reason:
                left[name] = reason
        for word, child in module.named_children():
            visit(f"{name}.{word}" if name else word, child)

    visit("", stage.module)
    return Choice(taken=tuple(taken), left=left)


def find_within(record: Record, segments: range) -> set[str]:
    """Return the modules whose calls each stay within one of the segments, except the whole model,
    whose outputs the user may inspect."""
    found: dict[str, bool] = {"": False}
    for call in record.calls:
        is_within = call.begin == call.end and call.begin in segments
        found[call.module] = found.get(call.module, True) and is_within
    return {name for name, is_within in found.items() if is_within}


def find_drawing(record: Record) -> set[str]:
    """Return the names of the modules in which the dry run drew random numbers, including a dry run
    in training mode, if there was one."""
    found: set[str] = set()
    for one in filter(None, (record, record.in_training)):
        for draw in (draw for held in one.draws.values() for draw in held):
            call = draw.call
            while call is not None:
                found.add(one.calls[call].module)
                call = one.calls[call].parent
    return found


def _is_worth(module: nn.Module) -> bool:
    """Return True if a module has parameters and is more than a single torch layer."""
    is_layer = type(module).__module__.startswith("torch.nn.") and not _has_children(module)
    return not is_layer and any(True for _ in module.parameters())


def _has_children(module: nn.Module) -> bool:
    return any(not isinstance(child, CutPoint) for child in module.children())


def _has_blocks(module: nn.Module) -> bool:
    """Return True if the module has consecutive modules of one class, each with several parts."""
    for held in module.modules():
        if isinstance(held, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(child) for child in held.children() if _has_children(child))
            if any(count > 1 for count in kinds.values()):
                return True
    return False


def _why_not(name: str, module: nn.Module, stubs: Iterable[str], drawing: set[str]) -> str:
    if name in drawing:
        return "the module uses random numbers"
    if any(stub.startswith(f"{name}.") for stub in stubs):
        return "some of its submodules run before the stage"
    for part in module.modules():
        if part is module:
            continue
        if isinstance(part, CutPoint):
            if part not in module.children() or not part.is_repeated:
                return "it contains CutPoints"
        elif has_hooks(part):
            return "some of its submodules have hooks"
    return ""


def has_hooks(module: nn.Module, *known: Callable[..., Any]) -> bool:
    """Return True if a module has hooks other than `known` and the hooks for fp32 modules."""
    held: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    hooks = [getattr(hook, "func", hook) for hooks in held for hook in hooks.values()]
    if any(hook not in (widen, narrow, *known) for hook in hooks):
        return True
    return bool(module._backward_hooks or module._backward_pre_hooks)


# Compiled forwards.


class Kind:
    """A class of modules that are compiled alike."""

    def __init__(self, name: str) -> None:
        self.name, self.is_eager = name, False
        self.reported: set[type[Exception]] = set()

    def give_up(self, module: str, error: Exception) -> None:
        """Log, once for the class, that an error prevents its modules from being compiled."""
        if type(error) in self.reported:
            return
        self.reported.add(type(error))
        reason = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
        which = f"each {self.name}" if self.is_eager else f"this {self.name}"
        log.warning(
            "module %r: %s is no longer compiled: %s: %.300s",
            module, which, type(error).__name__, reason,
        )  # fmt: skip


class CompiledForward:
    """A module's forward: compiled, or the original one if compilation has failed."""

    def __init__(
        self,
        name: str,
        eager: Callable[..., Any],
        kind: Kind,
        compile_it: Callable[[Callable[..., Any]], Callable[..., Any]],
        limit: type[Exception],
        errors: tuple[type[Exception], ...],
    ) -> None:
        self.name, self.eager, self.kind = name, eager, kind
        self.compiled, self.limit, self.errors = compile_it(eager), limit, errors
        self.is_eager = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.is_eager or self.kind.is_eager):
            try:
                return self.compiled(*args, **kwargs)
            except self.errors as error:
                self.is_eager = True
                # Too many graphs are no matter of the class: each module may need its own.
                self.kind.is_eager = not isinstance(error, self.limit)
                self.kind.give_up(self.name, error)
        return self.eager(*args, **kwargs)


def why_none(tensor: int, zero: int) -> str:
    """Return why this layout does not support torch.compile; empty if it does."""
    if tensor > 1:
        return "tensor above 1: sharded layers are not compiled"
    if zero == 3:
        return "zero=3: modules that gather their weights are not compiled"
    return ""


def compile_stages(
    stages: Sequence[Stage], backend: bool | str, puts_off: bool
) -> frozenset[nn.Module]:
    """Compile the eligible modules of these stages, log this, and return them with all submodules.

    `backend` is the name of a torch.compile backend, or True for the default. `puts_off` means that
    the schedule postpones weight gradients, which compiled modules do not support.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes seconds

    name = "inductor" if backend is True else str(backend)
    if name not in torch.compiler.list_backends(exclude_tags=None):
        known = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"compile={backend!r}: expected True, False or a torch backend: {known}")
    # Should a module draw that did not in the dry run, then from torch's own generator.
    options: Any = {"fallback_random": True} if name == "inductor" else None

    def compile_it(forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            forward, fullgraph=True, backend=name, options=options
        )
        return compiled

    kinds: dict[type, Kind] = {}
    found: set[nn.Module] = set()
    for stage in stages:
        choice = choose_modules(stage)
        for path in choice.taken:
            module = stage.module.get_submodule(path)
            if module in found:
                continue
            kind = kinds.setdefault(type(module), Kind(type(module).__name__))
            module.forward = CompiledForward(
                path, module.forward, kind, compile_it,
                FailOnRecompileLimitHit, (FailOnRecompileLimitHit, TorchDynamoException),
            )  # fmt: skip
            found.update(module.modules())
        _tell(stage.index, choice, name, puts_off)
    return frozenset(found)


def _tell(stage: int, choice: Choice, backend: str, puts_off: bool) -> None:
    names = list(choice.taken)
    late = "; their weight gradients are not postponed" if puts_off and names else ""
    shown = f"{len(names)} module{'s' * (len(names) != 1)} ({_show(names)})" if names else "nothing"
    log.log(
        logging.INFO if names else logging.WARNING,
        "stage %d: torch.compile (%s) compiles %s%s", stage, backend, shown, late,
    )  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for name, reason in choice.left.items():
        reasons.setdefault(reason, []).append(name)
    for reason, held in reasons.items():
        log.warning("stage %d: not compiled: %s: %s", stage, _show(held), reason)


def _show(names: Sequence[str]) -> str:
    more = f", and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more

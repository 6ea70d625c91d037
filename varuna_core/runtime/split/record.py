"""What a dry run writes down: calls, cuts, costs, and where each parameter and buffer is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from varuna_core.runtime.comm.values import TensorSpec
from varuna_core.runtime.split.cut import SplitError


@dataclass(kw_only=True)
class Call:
    """One call of one module."""

    module: str
    parent: int | None
    """The call that made this one."""

    begin: int
    """The segment it starts in."""

    end: int = -1
    """The segment it returns in; -1 when it did not return."""

    output: Any = None
    """What it returns, a TensorSpec for each tensor."""

    opaque: bool = True
    """It returns something that a stub cannot stand in for."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A CutPoint as the forward passed it."""

    name: str
    specs: tuple[TensorSpec, ...]
    """The tensors that cross it."""


@dataclass(kw_only=True)
class Record:
    """What one dry run saw."""

    calls: list[Call] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    costs: list[float] = field(default_factory=lambda: [0.0])
    uses: dict[str, set[tuple[int, int | None]]] = field(default_factory=dict)
    """Parameter or buffer name to (segment, innermost call) of each use."""

    changes: dict[str, set[int]] = field(default_factory=dict)
    """Buffer name to the segments that change it."""

    real: bool = False
    """It ran on real tensors, since the model looks at values."""

    problem: SplitError | None = None

    def is_within(self, call: int | None, stubbed: set[int]) -> bool:
        while call is not None:
            if call in stubbed:
                return True
            call = self.calls[call].parent
        return False


def tensor_names(model: nn.Module) -> dict[int, list[str]]:
    """Names of each parameter and buffer by identity; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return names

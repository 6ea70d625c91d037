"""Stand-ins for what lies before a stage: it must run, cheaply, and nothing it computes may matter.

The largest modules that own parameters and return before the stage begins are not run: a stub
returns buffers of the shapes they return. All stubs share one buffer a dtype. A module called both
before and in the stage is stubbed for its early calls alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varuna_core.runtime.comm.values import TensorSpec, map_leaves
from varuna_core.runtime.split.record import Record

Make = Callable[[TensorSpec], Tensor]


@dataclass(frozen=True, kw_only=True)
class StubCall:
    """What one stubbed call returns, and how many cuts it would have passed."""

    output: Any
    cuts: int


StubPlan = dict[str, list["StubCall | None"]]
"""For each stubbed module its calls that are made, in order; None where it runs for real."""


def plan_stubs(record: Record, first: int, names: Collection[str]) -> tuple[StubPlan, set[int]]:
    """Stubs for the modules `names` before segment `first`, and the calls that they replace."""
    plan: StubPlan = {}
    stubbed: set[int] = set()
    for number, call in enumerate(record.calls):
        if record.is_within(call.parent, stubbed):
            continue
        made = None
        if call.module in names and not call.opaque and 0 <= call.end < first:
            stubbed.add(number)
            made = StubCall(output=call.output, cuts=call.end - call.begin)
        plan.setdefault(call.module, []).append(made)
    return {name: calls for name, calls in plan.items() if any(calls)}, stubbed


class Pool:
    """One flat buffer a dtype, of which every stub's output is a view."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flats: dict[torch.dtype, Tensor] = {}
        self.versions: dict[torch.dtype, int] = {}

    def make(self, spec: TensorSpec) -> Tensor:
        size = 1 + sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
        flat = self.flats.get(spec.dtype)
        if flat is None or flat.numel() < size:
            flat = torch.zeros(max(size, 1), dtype=spec.dtype, device=self.device)
            self.flats[spec.dtype], self.versions[spec.dtype] = flat, flat._version
        return flat.as_strided(spec.shape, spec.stride)

    def clean(self) -> None:
        """Zero what code before the stage has written into: it must not grow from step to step."""
        for dtype, flat in self.flats.items():
            if flat._version != self.versions[dtype]:
                flat.zero_()
                self.versions[dtype] = flat._version


class Switch:
    """On while code before the stage runs: then stubs stand in."""

    def __init__(self) -> None:
        self.on = False


class Stub:
    """A module's forward while a stage runs."""

    def __init__(
        self, real: Callable[..., Any], switch: Switch, advance: Callable[[int], None]
    ) -> None:
        self.real, self.switch, self.advance = real, switch, advance
        self.calls: list[StubCall | None] = []
        self.is_simple, self.output, self.position = False, None, 0

    def load(self, calls: list[StubCall | None], make: Make) -> None:
        self.use(
            [call and StubCall(output=fill(call.output, make), cuts=call.cuts) for call in calls]
        )

    def use(self, calls: list[StubCall | None]) -> None:
        self.calls = calls
        only = calls[0] if len(calls) == 1 else None
        self.is_simple = only is not None and not only.cuts
        self.output = only.output if only is not None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_simple and self.switch.on:
            return self.output
        if not self.switch.on or not self.calls:
            return self.real(*args, **kwargs)
        # A call beyond the dry run's (code that looks at values) gets the last one's output.
        call = self.calls[min(self.position, len(self.calls) - 1)]
        self.position += 1
        if call is None:
            return self.real(*args, **kwargs)
        if call.cuts:
            self.advance(call.cuts)
        return call.output


def fill(output: Any, make: Make) -> Any:
    return map_leaves(lambda leaf: make(leaf) if isinstance(leaf, TensorSpec) else leaf, output)

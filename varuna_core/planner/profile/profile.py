"""What one model costs on each kind of GPU: every figure measured, or called an estimate.

A model that passes n cuts has n + 1 segments (docs/runtime.md); figures are a segment's, so the
embedding and the head are apart from the blocks. Nothing is scaled silently: between two measured
micro-batch sizes times are interpolated and say so; what cannot be had is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.links import Network, Source

FIGURES = (
    "forward_s",
    "backward_s",
    "input_grad_s",
    "weight_grad_s",
    "recompute_s",
    "output_bytes",
    "graph_bytes",
    "work_bytes",
)


TIMES = FIGURES[:5]
"""Those of actions, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """For one micro-batch size and tensor degree; each tuple has one figure a segment."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...] = ()
    """Both gradients in one go, which is less than one after the other; their sum if not given."""
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    output_bytes: tuple[float, ...]
    """What goes to the next stage if the segment is a stage's last one."""
    graph_bytes: tuple[float, ...]
    """What autograd keeps of one micro-batch until its backward."""
    work_bytes: tuple[float, ...]
    """The most that is held beyond that while the segment runs."""
    action_s: tuple[float, ...] = (0.0,) * len(TIMES)
    """Of each of TIMES: what the runtime adds to an action, however many segments it runs."""
    source: Source = "measured"

    def __post_init__(self) -> None:
        size = len(self.forward_s)
        if not self.backward_s and len(self.input_grad_s) == len(self.weight_grad_s):
            both = tuple(map(sum, zip(self.input_grad_s, self.weight_grad_s, strict=True)))
            object.__setattr__(self, "backward_s", both)
        if len(self.action_s) != len(TIMES) or not all(
            0 <= s < float("inf") for s in self.action_s
        ):
            raise PlanningError(f"action_s: {self.action_s}, expected {len(TIMES)} of 0 or more")
        for name in FIGURES:
            values = getattr(self, name)
            if len(values) != size or not all(0 <= value < float("inf") for value in values):
                raise PlanningError(f"{name}: {values}, expected {size} figures of 0 or more")
        if size and not any(self.forward_s) and not self.action_s[0]:
            raise PlanningError("forward_s is zero everywhere: that is no measurement")


@dataclass(frozen=True, kw_only=True)
class Tie:
    """One weight that several segments use."""

    segments: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a profile is of."""

    name: str
    digest: str
    """Of what the times depend on: sizes, sequence length, precision."""
    num_segments: int
    parameters: Mapping[int, tuple[int, ...]]
    """By tensor degree: a rank's share of each segment's parameters. A tied one counts in each."""
    ties: tuple[Tie, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuProfile:
    """One kind of GPU."""

    memory_bytes: float
    cells: Mapping[tuple[int, int], Cell]
    """By micro-batch size and tensor degree."""
    optimizer_s: Mapping[int, tuple[float, ...]]
    """By tensor degree, a figure a segment."""
    optimizer_source: Source = "measured"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One model, some kinds of GPU, their links."""

    model: Model
    software: Mapping[str, str]
    """Versions that times depend on, such as torch's."""
    gpus: Mapping[str, GpuProfile]
    network: Network
    details: tuple[Mapping[str, Any], ...] = ()
    """How it was measured, one for each kind of GPU and tensor degree ("gpu", "tensor"): for
    people, and for the profiler that goes on with it."""

    def find_gpu(self, kind: str) -> GpuProfile:
        gpu = self.gpus.get(kind)
        if gpu is None:
            known = ", ".join(sorted(self.gpus)) or "none"
            raise MissingData(f"the profile has no GPU {kind!r}; it has {known}")
        return gpu

    def find_cell(self, kind: str, micro_batch: int, tensor: int = 1) -> Cell:
        """Measured, or interpolated or continued from the two nearest sizes, and labelled so."""
        cells = self.find_gpu(kind).cells
        exact = cells.get((micro_batch, tensor))
        if exact is not None:
            return exact
        sizes = sorted(size for size, degree in cells if degree == tensor)
        if not sizes:
            degrees = sorted({degree for _, degree in cells})
            raise MissingData(
                f"the profile has no times of {kind} with tensor degree {tensor}, only {degrees}"
            )
        if len(sizes) == 1:
            raise MissingData(
                f"the profile has {kind}, tensor degree {tensor}, at micro-batch {sizes[0]} alone: "
                f"{micro_batch} cannot be told from it; profile one more size"
            )
        above = next((i for i, size in enumerate(sizes) if size > micro_batch), len(sizes) - 1)
        low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
        label: Source = "interpolated" if low < micro_batch < high else "estimate"
        return _mix(cells[low, tensor], cells[high, tensor], low, high, micro_batch, label)

    def list_degrees(self, kind: str) -> set[int]:
        return {degree for _, degree in self.find_gpu(kind).cells} & set(self.model.parameters)

    def find_parameters(self, tensor: int) -> tuple[int, ...]:
        found = self.model.parameters.get(tensor)
        if found is None:
            raise MissingData(
                f"the profile has no parameter counts for tensor degree {tensor}, only "
                f"{sorted(self.model.parameters)}"
            )
        return found

    def find_optimizer(self, kind: str, tensor: int) -> tuple[float, ...]:
        found = self.find_gpu(kind).optimizer_s.get(tensor)
        if found is None:
            raise MissingData(
                f"the profile has no optimizer times of {kind} with tensor degree {tensor}"
            )
        return found

    def check_is_of(self, model: Model, software: Mapping[str, str]) -> None:
        """PlanningError in words if this is a profile of something else."""
        if (self.model.name, self.model.digest) != (model.name, model.digest):
            raise PlanningError(
                f"the profile is of model {self.model.name!r} ({self.model.digest}), the plan is "
                f"for {model.name!r} ({model.digest}): profile that model"
            )
        if self.model.num_segments != model.num_segments:
            raise PlanningError(
                f"the profile has {self.model.num_segments} segments, the model "
                f"{model.num_segments}: its CutPoints have changed, profile it again"
            )
        for name in sorted(self.software.keys() & software.keys()):
            if self.software[name] != software[name]:
                raise PlanningError(
                    f"the profile was made with {name} {self.software[name]}, this is "
                    f"{software[name]}: profile again"
                )

    def extend(self, other: Profile) -> Profile:
        """Both; where both have a figure the other's, which is the later one's."""
        self.check_is_of(other.model, other.software)
        gpus = dict(self.gpus)
        for kind, added in other.gpus.items():
            own = gpus.get(kind)
            if own is not None:
                added = replace(
                    added,
                    cells={**own.cells, **added.cells},
                    optimizer_s={**own.optimizer_s, **added.optimizer_s},
                )
            gpus[kind] = added
        return replace(
            self,
            model=replace(
                self.model, parameters={**self.model.parameters, **other.model.parameters}
            ),
            software={**self.software, **other.software},
            gpus=gpus,
            network=Network(
                links={**self.network.links, **other.network.links},
                all_reduces={**self.network.all_reduces, **other.network.all_reduces},
            ),
            details=_join_details(self.details, other.details),
        )


def _join_details(
    before: Sequence[Mapping[str, Any]], later: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Of one kind of GPU and degree the later one's, with what the earlier one says of other
    micro-batch sizes, and where memory ran out."""
    told = {(one["gpu"], one["tensor"]): one for one in before}
    for one in later:
        key = one["gpu"], one["tensor"]
        old, new = told.get(key, {}), dict(one)
        for name, value in old.items():
            if isinstance(value, Mapping) and isinstance(new.get(name), Mapping):
                new[name] = {**value, **new[name]}
        if old.get("largest_micro_batch", 0) > new.get("largest_micro_batch", 0):
            new |= {name: old[name] for name in ("largest_micro_batch", "stopped") if name in old}
        new["stopped"] = new.get("stopped") or old.get("stopped", "")
        told[key] = new
    return tuple(told[key] for key in sorted(told))


def _mix(low: Cell, high: Cell, size: int, size2: int, wanted: int, label: Source) -> Cell:
    """On the line through both; below the smallest never less than its share of it."""
    part = (wanted - size) / (size2 - size)

    def mix(a: float, b: float) -> float:
        value = a + (b - a) * part
        return max(value, min(a, b) * min(1.0, wanted / size), 0.0)

    figures = {name: tuple(map(mix, getattr(low, name), getattr(high, name))) for name in FIGURES}
    if "estimate" in (low.source, high.source):
        label = "estimate"
    actions = tuple(map(mix, low.action_s, high.action_s))
    return Cell(**figures, action_s=actions, source=label)

"""A model's costs on each kind of GPU, and the time of messages on links.

A model that passes n cuts has n + 1 segments (docs/runtime.md); figures are a segment's, so the
embedding and the head are apart from the blocks. Every figure is measured or marked as an estimate:
between two measured micro-batch sizes, times are interpolated and marked so; a figure that cannot
be derived is an error. A link's time is piecewise linear over the message's size:

```
time  │            .-'   beyond the last point the slope of the last piece goes on
      │        .-'
      │  _.-'            before the first point its time: what is small costs the latency
      └────────────────  bytes
```

Messages that share a link count as one larger message: k flows of b bytes take as long as k x b
bytes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from varuna_core.planner.profile.errors import MissingData, PlanningError

Array = Any
Source = Literal["measured", "interpolated", "extrapolated", "estimate"]
Where = Literal["intra", "inter"]
"""The place of a link: between two GPUs of a node, or of two nodes."""


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """Transfer times over one direction of a link."""

    points: tuple[tuple[float, float], ...]
    """(bytes, seconds) pairs, both increasing."""
    source: Source = "measured"

    def __post_init__(self) -> None:
        if not self.points:
            raise PlanningError("a link needs at least one measured message")
        for (size, took), (size2, took2) in zip(self.points, self.points[1:], strict=False):
            if size2 <= size or took2 < took:
                raise PlanningError(f"a link's points must grow: {size2, took2} after {size, took}")
        if self.points[0][0] < 0 or self.points[0][1] < 0:
            raise PlanningError(f"a link's first point is {self.points[0]}: expected 0 or more")

    def compute_time(self, num_bytes: float) -> float:
        points = self.points
        if num_bytes <= 0:
            return 0.0
        if num_bytes <= points[0][0] or len(points) == 1:
            # One point alone is a bandwidth.
            return points[0][1] * max(1.0, num_bytes / points[0][0] if points[0][0] else 1.0)
        place = min(bisect_right(points, (num_bytes, float("inf"))), len(points) - 1)
        (size, took), (size2, took2) = points[place - 1], points[place]
        return took + (num_bytes - size) * (took2 - took) / (size2 - size)

    def compute_times(self, num_bytes: Array) -> Array:
        """Return the transfer times of messages of these sizes."""
        sizes, tooks = map(np.array, zip(*self.points, strict=True))
        if len(sizes) == 1:
            found = tooks[0] * np.maximum(1.0, num_bytes / sizes[0] if sizes[0] else 1.0)
        else:
            slope = (tooks[-1] - tooks[-2]) / (sizes[-1] - sizes[-2])
            beyond = np.maximum(0.0, num_bytes - sizes[-1]) * slope
            found = np.interp(num_bytes, sizes, tooks) + beyond
        return np.where(num_bytes > 0, found, 0.0)


def build_link(latency_s: float, gb_s: float, source: Source = "estimate") -> LinkTime:
    """Build a link from its latency and bandwidth (10^9 bytes a second)."""
    if gb_s <= 0 or latency_s < 0:
        raise PlanningError(f"a link of {latency_s} s and {gb_s} GB/s: expected positive numbers")
    return LinkTime(points=((0.0, latency_s), (1e9, latency_s + 1 / gb_s)), source=source)


LinkKey = tuple[str, str, Where]
"""Kinds of the sending and receiving GPU, and the place of the link."""


Half = Literal["reduce", "broadcast", "reduce_scatter", "all_gather"]
"""The two halves of an all-reduce, to the owners and back: of whole parameters, or of slices of
each parameter."""
HALVES: tuple[Half, ...] = ("reduce", "broadcast", "reduce_scatter", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Network:
    """All links that were measured or estimated."""

    links: dict[LinkKey, LinkTime]
    all_reduces: dict[tuple[str, int, int], LinkTime]
    """Measured all-reduce times by bytes, keyed by (kind, ranks in total, ranks on a node)."""
    halves: dict[tuple[Half, str, int, int], LinkTime] = field(default_factory=dict)
    """Measured times of halves, keyed by half and as `all_reduces`, by the bytes of the whole
    all-reduce; all ranks own equal shares."""

    def find(self, sender: str, receiver: str, where: Where) -> LinkTime:
        """Return the link in this direction, or the reverse one if only that was measured."""
        link = self.links.get((sender, receiver, where)) or self.links.get(
            (receiver, sender, where)
        )
        if link is None:
            raise MissingData(
                f"the profile has no {where}-node link from {sender} to {receiver}: profile it, "
                "or give its latency and bandwidth"
            )
        return link

    def is_sum_measured(self, nodes: Sequence[tuple[str, int]]) -> bool:
        """Return True if all-reduces of a group with these nodes and numbers of ranks were
        measured; times of other groups are estimates."""
        kind, count = nodes[0]
        found = self.all_reduces.get((kind, count * len(nodes), count))
        return len(set(nodes)) == 1 and found is not None and found.source == "measured"

    def find_all_reduce(
        self, nodes: Sequence[tuple[str, int]], num_bytes: Array, sharing: int = 1
    ) -> tuple[Array, Source]:
        """Return the all-reduce time of a group, given as each node's kind and number of ranks.

        Measured times are used if there are any. Otherwise rings are assumed: within each node,
        then over the nodes, then back within; `sharing` groups use the links between nodes at the
        same time.
        """
        size = sum(count for _, count in nodes)
        num_bytes = np.asarray(num_bytes, dtype=float)
        if size <= 1:
            return np.zeros_like(num_bytes), "measured"
        if len(set(nodes)) == 1:
            kind, count = nodes[0]
            measured = self.all_reduces.get((kind, size, count))
            if measured is not None:
                return measured.compute_times(num_bytes * sharing), "measured"
        inner = np.zeros_like(num_bytes)
        for kind, count in {*nodes}:  # of thousands of nodes few differ
            if count > 1:
                link = self.find(kind, kind, "intra")
                # Reduce-scatter and all-gather: 2 (n - 1) messages of an n-th.
                took = 2 * (count - 1) * link.compute_times(num_bytes / count)
                inner = np.maximum(inner, took)
        outer = np.zeros_like(num_bytes)
        if len(nodes) > 1:
            # Each rank of a node goes on with its share: together the node's link carries all.
            share = num_bytes / len(nodes) * sharing
            pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
            for a, b in {(a, b) for (a, _), (b, _) in pairs}:
                took = 2 * (len(nodes) - 1) * self.find(a, b, "inter").compute_times(share)
                outer = np.maximum(outer, took)
        return inner + outer, "estimate"

    def compute_half(
        self, half: Half, nodes: Sequence[tuple[str, int]], num_bytes: Array, sharing: int = 1
    ) -> Array:
        """Return times of one half of an all-reduce, such as reduce_scatter: measured, or else half
        of the time of the whole."""
        if len(set(nodes)) == 1:
            kind, count = nodes[0]
            measured = self.halves.get((half, kind, count * len(nodes), count))
            if measured is not None:
                return measured.compute_times(np.asarray(num_bytes, dtype=float) * sharing)
        return self.find_all_reduce(nodes, num_bytes, sharing)[0] / 2


FIGURES = (
    "forward_s",
    "backward_s",
    "input_grad_s",
    "weight_grad_s",
    "recompute_s",
    "output_bytes",
    "graph_bytes",
    "work_bytes",
    "selective_s",
    "kept_bytes",
    "offload_s",
    "load_s",
    "selective_host_s",
    "forward_host_s",
    "backward_host_s",
    "input_grad_host_s",
    "weight_grad_host_s",
    "recompute_host_s",
)
TIMES, HOST_TIMES = FIGURES[:5], FIGURES[-5:]
"""Figures of actions in seconds: time on the device, and on the host that launches the work."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "selective": ("selective_s", "kept_bytes"),
    "offload": ("offload_s", "load_s"),
}
"""Figures needed for a recompute mode, which older profiles lack."""
OPTIONAL = ("selective_host_s", *itertools.chain(*NEEDS.values()))
FIGURE_OF = {
    "F": "forward_s",
    "f": "forward_s",
    "R": "recompute_s",
    "B": "backward_s",
    "I": "input_grad_s",
    "W": "weight_grad_s",
}
"""The figure that gives the cost of each kind of action."""


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Spread of measured times, as QUANTILES of the time divided by its median."""

    rounds: tuple[float, ...]
    """The common spread of a round's figures, since a machine is slow or fast for a while."""
    actions: tuple[tuple[float, ...], ...]
    """The spread of each of TIMES, relative to its round."""

    def __post_init__(self) -> None:
        if len(self.actions) != len(TIMES):
            raise PlanningError(f"spread: {len(self.actions)} actions, expected {len(TIMES)}")
        for row in (self.rounds, *self.actions):
            grows = all(a <= b for a, b in zip((0.0, *row), (*row, float("inf")), strict=True))
            if len(row) != len(QUANTILES) or not grows or row[-1] == float("inf"):
                raise PlanningError(f"spread: {row}, expected {len(QUANTILES)} growing numbers")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Figures for one micro-batch size and tensor degree; each tuple has one for each segment."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...] = ()
    """Seconds for both gradients at once, usually less than their sum; the sum if not given."""
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    output_bytes: tuple[float, ...]
    """Bytes sent to the next stage if the segment is a stage's last one."""
    graph_bytes: tuple[float, ...]
    """Bytes that autograd keeps for one micro-batch until its backward."""
    work_bytes: tuple[float, ...]
    """The largest number of additional bytes held while the segment runs."""
    selective_s: tuple[float, ...] = ()
    """`recompute: selective`: seconds of a recompute, and those that saving products adds to the
    forward. This and the following figures are empty if not known."""
    kept_bytes: tuple[float, ...] = ()
    """Bytes that a forward keeps for a selective recompute of a micro-batch, without its input."""
    offload_s: tuple[float, ...] = ()
    """Seconds to copy the graph, without the input, to the host."""
    load_s: tuple[float, ...] = ()
    """Seconds to copy the graph back from the host."""
    selective_host_s: tuple[float, ...] = ()
    forward_host_s: tuple[float, ...] = ()
    """The host's seconds; zeros mean that they equal the device's, or are not known."""
    backward_host_s: tuple[float, ...] = ()
    input_grad_host_s: tuple[float, ...] = ()
    weight_grad_host_s: tuple[float, ...] = ()
    recompute_host_s: tuple[float, ...] = ()
    action_s: tuple[float, ...] = (0.0,) * len(TIMES)
    """For each of TIMES, the seconds that an action adds, however many segments it runs."""
    action_host_s: tuple[float, ...] = (0.0,) * len(TIMES)
    """For each of HOST_TIMES, the host's seconds that an action adds, however many segments it
    runs."""
    spread: Spread | None = None
    """Spread of the times; None if not known, as for estimates and old profiles."""
    source: Source = "measured"

    def __post_init__(self) -> None:
        size = len(self.forward_s)
        if not self.backward_s and len(self.input_grad_s) == len(self.weight_grad_s):
            both = tuple(map(sum, zip(self.input_grad_s, self.weight_grad_s, strict=True)))
            object.__setattr__(self, "backward_s", both)
        for name in (*HOST_TIMES, *["selective_host_s"] * bool(self.selective_s)):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * size)
        for name in ("action_s", "action_host_s"):
            values = getattr(self, name)
            if len(values) != len(TIMES) or not all(0 <= s < float("inf") for s in values):
                raise PlanningError(f"{name}: {values}, expected {len(TIMES)} times of 0 or more")
        for name in FIGURES:
            values = getattr(self, name)
            if name in OPTIONAL and not values:
                continue
            if len(values) != size or not all(0 <= value < float("inf") for value in values):
                raise PlanningError(f"{name}: {values}, expected {size} numbers of 0 or more")
        if size and not any(self.forward_s) and not self.action_s[0]:
            raise PlanningError("forward_s is zero everywhere, so it was not measured")


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A weight that several segments share."""

    segments: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """The profiled model."""

    name: str
    digest: str
    """Hash of everything that the times depend on: sizes, sequence length, precision."""
    num_segments: int
    parameters: Mapping[int, tuple[int, ...]]
    """A rank's share of each segment's parameters by tensor degree; tied ones count in each."""
    ties: tuple[Tie, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuProfile:
    """Figures of one kind of GPU."""

    memory_bytes: float
    cells: Mapping[tuple[int, int], Cell]
    """Cells by micro-batch size and tensor degree."""
    optimizer_s: Mapping[int, tuple[float, ...]]
    """Seconds of the optimizer by tensor degree, a figure for each segment."""
    optimizer_source: Source = "measured"
    copies_beside: bool = False
    """True if graphs are copied to the host and back while the GPU works."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Figures of one model on some kinds of GPU, with the links between them."""

    model: Model
    software: Mapping[str, str]
    """Versions that the times depend on, such as torch's."""
    gpus: Mapping[str, GpuProfile]
    network: Network
    details: tuple[Mapping[str, Any], ...] = ()
    """How the figures were measured, for each kind of GPU and tensor degree ("gpu", "tensor"): for
    people, and for a profiler that resumes."""

    def find_gpu(self, kind: str) -> GpuProfile:
        gpu = self.gpus.get(kind)
        if gpu is None:
            known = ", ".join(sorted(self.gpus)) or "none"
            raise MissingData(f"the profile has no GPU {kind!r}; it has {known}")
        return gpu

    def estimate_cell(self, kind: str, micro_batch: int, tensor: int = 1) -> Cell:
        """Return a measured cell, or a cell interpolated or extrapolated from two measured ones;
        the cell's source says which."""
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
                f"the profile covers {kind}, tensor degree {tensor}, only at micro-batch "
                f"{sizes[0]}, from which {micro_batch} cannot be estimated: profile one more size"
            )
        above = next((i for i, size in enumerate(sizes) if size > micro_batch), len(sizes) - 1)
        low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
        label: Source = "interpolated" if low < micro_batch < high else "extrapolated"
        return mix_cells(cells[low, tensor], cells[high, tensor], low, high, micro_batch, label)

    def knows(self, recompute: str) -> bool:
        """Return True if all cells have the figures that this recompute mode needs."""
        cells = [cell for gpu in self.gpus.values() for cell in gpu.cells.values()]
        return all(getattr(cell, name) for cell in cells for name in NEEDS.get(recompute, ()))

    def list_degrees(self, kind: str) -> set[int]:
        return {degree for _, degree in self.find_gpu(kind).cells} & set(self.model.parameters)

    def compute_parameters(self, tensor: int) -> tuple[int, ...]:
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
        """Raise PlanningError if the profile is of another model or other versions."""
        if (self.model.name, self.model.digest) != (model.name, model.digest):
            raise PlanningError(
                f"the profile is of model {self.model.name!r} ({self.model.digest}), but the "
                f"plan is for {model.name!r} ({model.digest}): profile that model"
            )
        if self.model.num_segments != model.num_segments:
            raise PlanningError(
                f"the profile has {self.model.num_segments} segments, but the model has "
                f"{model.num_segments}: its CutPoints have changed, so profile again"
            )
        for name in sorted(self.software.keys() & software.keys()):
            if self.software[name] != software[name]:
                raise PlanningError(
                    f"the profile was made with {name} {self.software[name]}, but this is "
                    f"{software[name]}: profile again"
                )

    def extend(self, other: Profile) -> Profile:
        """Return both profiles as one, preferring the figures of `other`, which are later."""
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
                halves={**self.network.halves, **other.network.halves},
            ),
            details=_join_details(self.details, other.details),
        )


def _join_details(
    before: Sequence[Mapping[str, Any]], later: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Merge details by kind of GPU and degree: the later profile's, plus the earlier one's other
    micro-batch sizes and limits of memory."""
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


def mix_cells(low: Cell, high: Cell, size: int, size2: int, wanted: int, label: Source) -> Cell:
    """Return a cell derived linearly from two others; each figure is at least the smaller of
    theirs, reduced in proportion to the micro-batch size if `wanted` is below `size`."""
    part = (wanted - size) / (size2 - size)

    def mix(a: float, b: float) -> float:
        value = a + (b - a) * part
        return max(value, min(a, b) * min(1.0, wanted / size), 0.0)

    figures = {name: tuple(map(mix, getattr(low, name), getattr(high, name))) for name in FIGURES}
    if "estimate" in (low.source, high.source):
        label = "estimate"
    actions = tuple(map(mix, low.action_s, high.action_s))
    host = tuple(map(mix, low.action_host_s, high.action_host_s))
    spread = (low if wanted - size < size2 - wanted else high).spread
    return Cell(**figures, action_s=actions, action_host_s=host, spread=spread, source=label)

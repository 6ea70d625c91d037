"""Measure one tensor degree on all ranks, at growing sizes until memory runs out.

build the rank's segments ─► size 1 ─► gather ─► size 2 ─► gather ─► ..
                                         a kind of GPU on which a rank is out of memory stops

Two segments are equal if they have parameters and crossing tensors of the same shapes, and the same
amount of work in the dry run. A few segments of each class of equal ones are measured.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from varuna_core.planner.profile.profile import FIGURE_OF, QUANTILES, TIMES, Spread, Tie
from varuna_core.profiling.bench import (
    ROUND,
    Bench,
    BuildOptimizer,
    Crossings,
    Figures,
    free_memory,
    is_out_of_memory,
    join_figures,
)
from varuna_core.profiling.profile_file import Detail
from varuna_core.profiling.ranks import Crew, deal
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.runtime.comm.failure import close_group, is_connection_error
from varuna_core.runtime.comm.links import connect_sharing
from varuna_core.runtime.comm.values import sign
from varuna_core.runtime.split.split import Split
from varuna_core.schedule.recompute import USABLE

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding


# Equal segments.


def find_classes(split: Split) -> list[tuple[int, ...]]:
    """Return the segments, grouped into classes of equal ones, in the model's order."""
    held: dict[int, list[Any]] = {}
    parameters = dict(split.model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        for segment in sorted(split.segments[name]):
            described = (
                tuple(parameter.shape),
                str(parameter.dtype),
                parameter.requires_grad,
                split.groups[name][0] != name or len(split.segments[name]) > 1,
            )
            held.setdefault(segment, []).append(described)
    record, last = split.record, len(split.stages) - 1
    classes: dict[Any, list[int]] = {}
    for segment in range(last + 1):
        before = record.cuts[segment - 1].specs if segment else None
        after = record.cuts[segment].specs if segment < last else None
        work = f"{record.costs[segment]:.9e}"
        key = (tuple(held.get(segment, ())), before, after, work)
        classes.setdefault(key, []).append(segment)
    return [tuple(found) for found in classes.values()]


def choose_samples(classes: Sequence[tuple[int, ...]], most: int) -> dict[int, tuple[int, ...]]:
    """Return the segments to measure, evenly spread over each class, with their classes."""
    chosen: dict[int, tuple[int, ...]] = {}
    for equals in classes:
        count = min(most, len(equals))
        places = {round(i * (len(equals) - 1) / max(1, count - 1)) for i in range(count)}
        chosen |= {equals[place]: equals for place in sorted(places)}
    return dict(sorted(chosen.items()))


def list_ties(split: Split) -> tuple[Tie, ...]:
    """Return weights used by several segments; each stage of `split` is one segment."""
    parameters = dict(split.model.named_parameters(remove_duplicate=False))
    return tuple(
        Tie(segments=tie.stages, parameters=parameters[tie.names[0]].numel())
        for tie in split.ties
        if len(tie.stages) > 1
    )


def digest_model(model: nn.Module, inputs: Mapping[str, Any], precision: str) -> str:
    """Hash the shapes of modules, parameters, buffers and a sample, and the precision."""
    words = [
        precision,
        repr(sign(dict(inputs))),
        [[name, type(module).__name__] for name, module in model.named_modules()],
        [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()],
        [[n, list(b.shape), str(b.dtype)] for n, b in model.named_buffers()],
    ]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


# Spread.


def find_spread(ranks: Sequence[Mapping[int, Sequence[Sequence[float]]]]) -> Spread | None:
    """Return the spread of rounds, and of actions within a round; None if none was measured. Each
    rank gives, by segment, the seconds of the actions of each round.

    Actions are weighted by length, since long ones make up most of a step.
    """
    paces: list[tuple[float, float]] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TIMES}
    for segments in ranks:
        count = min(map(len, segments.values()), default=0)
        taken = [rows[:count] for rows in segments.values()]
        if not count:
            continue
        usual = [[median(column) for column in zip(*rows, strict=True)] for rows in taken]
        whole = sum(map(sum, usual))
        for number in range(count):
            pace = sum(sum(rows[number]) for rows in taken) / whole
            paces.append((pace, 1.0))
            for rows, columns in zip(taken, usual, strict=True):
                for (kind, _), took, length in zip(ROUND, rows[number], columns, strict=True):
                    if length > 0:
                        found[FIGURE_OF[kind]].append((took / length / pace, length))
    if not paces:
        return None
    actions = [_find_quantiles(found[name] or [(1.0, 1.0)]) for name in TIMES]
    return Spread(rounds=_find_quantiles(paces), actions=tuple(actions))


def _find_quantiles(weighted: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the QUANTILES of weighted values, relative to their median."""
    values, weights = np.array(sorted(weighted)).T
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    found = np.interp(QUANTILES, middles, values)
    return tuple((found / found[len(QUANTILES) // 2]).tolist())


# Measuring.

T = TypeVar("T")
EMPTY = 1
"""Index at which the empty stage is inserted, between the first segment and the others."""
NOTHING = -1
"""Key of the empty stage's figures, in the place of a segment's index."""
HANG_S = 300.0
"""Seconds for which ranks that share layers wait for each other."""
MakeInputs = Callable[[int], Mapping[str, Any]]


@dataclass(kw_only=True)
class Measured:
    """Figures of one kind of GPU at one tensor degree; lists have one for each segment."""

    kind: str
    tensor: int
    parameters: list[int]
    """A rank's share of each segment's parameters."""
    optimizer_s: list[float]
    cells: dict[int, list[Figures]] = field(default_factory=dict)
    """Figures of segments by micro-batch size."""
    empty: dict[int, Figures] = field(default_factory=dict)
    """Figures of an empty stage, the fixed cost of actions, by micro-batch size."""
    spreads: dict[int, Spread] = field(default_factory=dict)
    stopped: str = ""

    def describe(
        self, classes: Sequence[Sequence[int]], samples: Mapping[int, Sequence[int]]
    ) -> Detail:
        return Detail(
            gpu=self.kind,
            tensor=self.tensor,
            equals=[list(held) for held in classes],
            measured={str(size): list(samples) for size in self.cells},
            largest_micro_batch=max(self.cells, default=0),
            stopped=self.stopped,
        )


class Measuring:
    """Measures one tensor degree; every rank creates one at the same time."""

    def __init__(
        self,
        split: Split,
        empty: Split | None,
        crew: Crew,
        tensor: int,
        *,
        classes: Sequence[tuple[int, ...]],
        samples: Mapping[int, tuple[int, ...]],
        tensor_plan: Mapping[str, Any] | None,
        loss_scale: float,
        seed: int,
        prepare: Callable[[nn.Module], None],
        selective: bool,
        say: Callable[[str], None],
    ) -> None:
        """`split` has a stage for each segment. `empty` also has a stage, EMPTY, without a segment;
        it is None for a model of one segment."""
        self.split, self.empty, self.crew, self.tensor = split, empty, crew, tensor
        self.classes, self.samples, self.tensor_plan = classes, samples, tensor_plan
        self.loss_scale, self.seed, self.say = loss_scale, seed, say
        self.prepare, self.selective = prepare, selective
        self.entries = crew.list_entries(tensor)
        self.kind_of = {
            rank: kind for kind, groups in self.entries.items() for held in groups for rank in held
        }
        self.own = deal(self.entries, list(samples), crew.rank)
        self.group: Any = None
        """Group of the ranks that share layers."""

        self.sharding: Sharding | None = None
        self.benches: dict[int, Bench] = {}
        """Benches by segment."""

    def run(
        self,
        make_inputs: MakeInputs,
        sizes: Sequence[int],
        build: BuildOptimizer,
        limit_s: float | None,
    ) -> list[Measured]:
        """Measure each kind of GPU with enough ranks; the result is equal on all ranks.

        A size that would probably end after `limit_s` is left out.
        """
        for kind in self.crew.kinds:
            if kind not in self.entries:
                self.say(f"{kind}: no node has {self.tensor} ranks for tensor {self.tensor}")
        if self.tensor > 1:
            world = self.crew.world_size
            places = "".join(f"{entry};" for entry in range(world // self.tensor))
            stages = parse_stage_map(places, world, self.tensor)
            self.group = connect_sharing(
                stages, self.crew.rank, self.crew.device, HANG_S, self.crew.may_share
            )
        try:
            found = self._build(build)
            self._grow(make_inputs, sizes, found, limit_s)
        finally:
            self._close()
        return list(found.values())

    def _close(self) -> None:
        """Release the group, so that ranks waiting for this one continue with an error."""
        group, self.group = self.group, None
        if self.sharding is not None:
            self.sharding.release()
        if group is not None:
            close_group(group)

    def _build(self, build: BuildOptimizer) -> dict[str, Measured]:
        """Build this rank's segments, and measure what is independent of the micro-batch size."""
        optimizers: dict[int, float] = {}
        crossings = Crossings(self.split)
        error: BaseException | None = None
        try:
            if self.group is not None and self.own:
                from varuna_core.runtime.tensor_parallel.sharding import (
                    Sharding,  # half a second, where it is needed
                )

                self.sharding = Sharding(self.split, self.tensor_plan, self.group, self.crew.device)
            for segment in self.own:
                bench = self.benches[segment] = Bench(
                    self.split,
                    segment,
                    crossings,
                    loss_scale=self.loss_scale,
                    seed=self.seed,
                    sharding=self.sharding,
                    selective=self.selective,
                )
                self.prepare(bench.stage.module)
                optimizers[segment] = bench.measure_optimizer(build)
                free_memory(self.crew.device)
            if self.own and self.empty is not None:
                self.benches[NOTHING] = Bench(
                    self.empty,
                    EMPTY,
                    Crossings(self.empty),
                    loss_scale=self.loss_scale,
                    seed=self.seed,
                    sharding=None,
                    selective=self.selective,
                )
        except Exception as caught:
            error = caught
        self.crew.agree(error)
        counts = {segment: self.benches[segment].num_parameters for segment in optimizers}
        told = self.crew.gather((counts, optimizers))
        return {
            kind: Measured(
                kind=kind,
                tensor=self.tensor,
                parameters=self._fill(_merge([told[rank][0] for rank in ranks], max), max),
                optimizer_s=self._fill(_merge([told[rank][1] for rank in ranks], max), median),
            )
            for kind, ranks in self._list_ranks()
        }

    def _list_ranks(self) -> list[tuple[str, list[int]]]:
        return [
            (k, [rank for held in groups for rank in held]) for k, groups in self.entries.items()
        ]

    def _grow(
        self,
        make_inputs: MakeInputs,
        sizes: Sequence[int],
        found: Mapping[str, Measured],
        limit_s: float | None,
    ) -> None:
        """Measure growing sizes until each kind is out of memory or all sizes are done."""
        spent = last_s = 0.0
        for place, size in enumerate(sizes):
            if limit_s is not None and place:
                coming_s = last_s * size / sizes[place - 1]
                if spent + coming_s > limit_s:
                    self._leave_out(found, size, limit_s)
                    return
            begin = time.monotonic()
            mine = found.get(self.kind_of.get(self.crew.rank, ""))
            measured: dict[int, Figures] = {}
            failed, rounds = "", {}
            if mine is not None and not mine.stopped:
                measured, failed = self._measure_own(make_inputs, size)
                held = self.benches.items()
                rounds = {s: bench.rounds for s, bench in held if s in measured and s != NOTHING}
            else:
                self.crew.agree(None)
            after = sizes[place + 1] if place + 1 < len(sizes) else 0
            too_large = bool(measured) and self._foresee_too_large(measured, after / size)
            told = self.crew.gather((measured, failed, time.monotonic() - begin, too_large, rounds))
            last_s = max(one[2] for one in told)
            spent += last_s
            for kind, ranks in self._list_ranks():
                one = found[kind]
                if one.stopped:
                    continue
                words = next((told[rank][1] for rank in ranks if told[rank][1]), "")
                if words:
                    one.stopped = f"out of memory at micro-batch {size}: {words}"
                    self.say(f"{kind}, tensor {self.tensor}: {one.stopped}")
                    continue
                joined = _merge([told[rank][0] for rank in ranks], join_figures)
                if NOTHING in joined:
                    one.empty[size] = joined[NOTHING]
                spread = find_spread([told[rank][4] for rank in ranks])
                if spread is not None:
                    one.spreads[size] = spread
                one.cells[size] = self._fill(joined, lambda many: join_figures(many, median))
                self.say(f"{kind}, tensor {self.tensor}, micro-batch {size}: measured")
                if any(told[rank][3] for rank in ranks):
                    one.stopped = f"micro-batch {after} skipped: it would not fit in memory"
                    self.say(f"{kind}, tensor {self.tensor}: {one.stopped}")
            if all(one.stopped for one in found.values()):
                return

    def _foresee_too_large(self, measured: Mapping[int, Figures], growth: float) -> bool:
        """Return True if ranks that share layers should not try the next size: a rank that runs out
        of memory would leave the others in an NCCL kernel that nothing ends."""
        device = self.crew.device
        if self.tensor == 1 or device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needed = max(f.graph_bytes + f.work_bytes + f.output_bytes for f in measured.values())
        return needed * growth > USABLE * free

    def _leave_out(self, found: Mapping[str, Measured], size: int, limit_s: float) -> None:
        for kind, one in found.items():
            if not one.stopped:
                one.stopped = f"micro-batch {size} skipped: it would take longer than {limit_s:g} s"
                self.say(f"{kind}, tensor {self.tensor}: {one.stopped}")

    def _measure_own(self, make_inputs: MakeInputs, size: int) -> tuple[dict[int, Figures], str]:
        """Measure each of this rank's segments; return the figures, and where memory ran out."""
        measured: dict[int, Figures] = {}
        error: BaseException | None = None
        failed = ""
        segment = -1
        try:
            rounds = {}
            for segment, bench in self.benches.items():
                rounds[segment] = bench.begin(make_inputs(size), size)
            for number in range(max(rounds.values(), default=0)):
                for segment, bench in self.benches.items():
                    if number < rounds[segment]:
                        bench.run_round()
            for segment, bench in self.benches.items():
                measured[segment] = bench.finish()
        except Exception as caught:
            error, failed = caught, f"segment {segment}"
        if error is not None and is_out_of_memory(error):
            error = None  # and with it its frames, and what they hold
        elif error is not None and self.group is not None and is_connection_error(error):
            error, failed = None, f"{failed}, on a rank that shards the same layers"
        if failed:
            self._close()
            for bench in self.benches.values():
                bench.clear()
            free_memory(self.crew.device)
        self.crew.agree(error)
        return measured, failed

    def _fill(self, measured: Mapping[int, T], join: Callable[[list[T]], T]) -> list[T]:
        """Return a value for every segment: measured, or joined from equal measured segments."""
        filled: dict[int, T] = {}
        for equals in self.classes:
            shared = join([measured[segment] for segment in equals if segment in measured])
            filled |= {segment: measured.get(segment, shared) for segment in equals}
        return [filled[segment] for segment in sorted(filled)]


def _merge(many: Sequence[Mapping[int, T]], join: Callable[[list[T]], T]) -> dict[int, T]:
    """Join the values of several ranks by segment."""
    keys = sorted({key for one in many for key in one})
    return {key: join([one[key] for one in many if key in one]) for key in keys}

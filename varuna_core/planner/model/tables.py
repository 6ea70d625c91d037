"""Compute matrices of figures for every run of segments, and for each stage on its GPUs.

Matrices have a row for each first segment a and a column for each end e. They are computed once for
each kind of place and shared by all stages and placements that have it. The costs of a stage depend
on its GPUs, the links at both ends, and its role in the schedule: how often it runs each kind of
action, what it holds, and how far it runs ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from varuna_core.planner.model.cluster import Boundary, StageSite
from varuna_core.planner.model.kept import KeptGraphs, Known, choose_kept
from varuna_core.planner.model.schedule_model import Role
from varuna_core.planner.model.step import BUCKET_BYTES
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import (
    FIGURE_OF,
    HOST_TIMES,
    OPTIONAL,
    QUANTILES,
    TIMES,
    Cell,
    Half,
    Profile,
    Spread,
)
from varuna_core.schedule.actions import Kind
from varuna_core.schedule.compiled import KINDS
from varuna_core.schedule.recompute import USABLE

Array = Any
STAGE_BYTES = 60
"""Bytes of a stage's matrices for each run of segments."""
MOST_KEPT_BYTES = 6e8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that all stages of a layout have in common."""

    tensor: int
    replicas: int
    micro_batch: int
    zero: int = 0

    @property
    def shares(self) -> int:
        """The ZeRO stage in effect; 0 if there is only one replica."""
        return self.zero if self.replicas > 1 else 0

    @property
    def owners(self) -> int:
        """The number of replicas that share the optimizer's work."""
        return self.replicas if self.zero else 1


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Times of a stage's collectives between replicas, by its first segment and its end."""

    reduce: Array
    """Sum of the gradients, once per step."""
    exchange: Array
    """Transfer of weights from their owners, once per step (ZeRO 1 and 2)."""
    scatter: Array
    """Reduce-scatter of a micro-batch's gradients, with its backward (ZeRO 2 and 3)."""
    gather: Array
    """Gathering of weights, for every forward or backward of the stage (ZeRO 3)."""


@dataclass(frozen=True, kw_only=True)
class TimeTables:
    """Times of actions on one kind of place, as matrices by the begin and the end of a stage's
    segments."""

    forward: Array
    backward: Array
    """A backward that computes both gradients at once."""
    input_grad: Array
    weight_grad: Array
    recompute: Array
    action: dict[str, float]
    """Part of an action's time that does not depend on the segments, keyed by the figure of the
    profile."""
    optimizer: Array
    graph_bytes: Array
    work_bytes: Array
    memory_bytes: float
    """Usable bytes of a GPU in this place."""
    host: dict[str, Array]
    """The host's time for each action by the same names; empty if not known."""
    host_action: dict[str, float]
    optional: dict[str, Array]
    """The known figures of recompute modes, keyed by the profile's names."""
    copies_beside: bool
    """True if the GPU computes while graphs are copied."""
    sources: frozenset[str]
    spread: Spread | None
    """The spread of measured times; the widest if there are several kinds of GPU."""

    @property
    def by_name(self) -> dict[str, Array]:
        """Times of actions by the profile's names."""
        found = self.forward, self.backward, self.input_grad, self.weight_grad, self.recompute
        return dict(zip(TIMES, found, strict=True))


class Tables:
    """All matrices for one profile and one training, computed when needed."""

    def __init__(self, profile: Profile, training: TrainingModel) -> None:
        self.profile, self.training = profile, training
        self.size = profile.model.num_segments
        self._times: dict[tuple[tuple[str, ...], int, int], TimeTables] = {}
        self._outputs: dict[tuple[str, int, int], Array] = {}
        self._hops: dict[tuple[Boundary, int, int], Array] = {}
        self._sums: dict[tuple[StageSite, int, int, int], Sums] = {}
        self._parameters: dict[int, Array] = {}
        self._buckets: dict[int, Array] = {}
        self.stages: dict[Any, Any] = {}
        """Cache of `compute_stage`."""
        self.behind: dict[Any, Any] = {}
        """Cache of `chain.compute_behind`."""
        self.kept: Known = {}

    def forget(self) -> None:
        """Drop the stages' matrices once they take more than a few hundred MB."""
        if len(self.stages) * (self.size + 1) ** 2 * STAGE_BYTES > MOST_KEPT_BYTES:
            self.stages.clear()
            self.behind.clear()

    def compute_times(self, kinds: tuple[str, ...], micro_batch: int, tensor: int) -> TimeTables:
        key = kinds, micro_batch, tensor
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self._make_times(*key)
        return found

    def _make_times(self, kinds: tuple[str, ...], micro_batch: int, tensor: int) -> TimeTables:
        cells = [self.profile.estimate_cell(kind, micro_batch, tensor) for kind in kinds]

        def take(name: str) -> Array:
            figures = spread(np.max([getattr(cell, name) for cell in cells], axis=0))
            return figures + action.get(name, 0.0)

        most = map(max, zip(*(cell.action_s for cell in cells), strict=True))
        action = dict(zip(TIMES, most, strict=True))
        most = map(max, zip(*(cell.action_host_s for cell in cells), strict=True))
        host_action = dict(zip(TIMES, most, strict=True))
        host = {
            name: spread(np.max([getattr(cell, own) for cell in cells], axis=0)) + host_action[name]
            for name, own in zip(TIMES, HOST_TIMES, strict=True)
        }
        known = [name for name in OPTIONAL if all(getattr(cell, name) for cell in cells)]
        # What such a recompute costs by itself is what any does.
        own = {"selective_s": action["recompute_s"], "selective_host_s": host_action["recompute_s"]}
        optimizers = [self.profile.find_optimizer(kind, tensor) for kind in kinds]
        gpus = [self.profile.find_gpu(kind) for kind in kinds]
        memory = min(gpu.memory_bytes for gpu in gpus)
        return TimeTables(
            forward=take("forward_s"),
            backward=take("backward_s"),
            input_grad=take("input_grad_s"),
            weight_grad=take("weight_grad_s"),
            recompute=take("recompute_s"),
            action=action,
            optimizer=spread(np.max(optimizers, axis=0)),
            graph_bytes=take("graph_bytes"),
            work_bytes=_compute_largest(np.max([cell.work_bytes for cell in cells], axis=0)),
            memory_bytes=memory * self.training.memory_share,
            host=host if any(values.any() for values in host.values()) else {},
            host_action=host_action,
            optional={name: take(name) + own.get(name, 0.0) for name in known},
            copies_beside=all(gpu.copies_beside for gpu in gpus),
            sources=frozenset(cell.source for cell in cells),
            spread=_find_widest([cell.spread for cell in cells]),
        )

    def compute_parameters(self, tensor: int) -> Array:
        if tensor not in self._parameters:
            self._parameters[tensor] = spread(
                np.array(self.profile.compute_parameters(tensor), dtype=float)
            )
        return self._parameters[tensor]

    def compute_outputs(self, kind: str, micro_batch: int, tensor: int) -> Array:
        """Return the bytes sent after e segments, for each e from 0 on."""
        key = kind, micro_batch, tensor
        if key not in self._outputs:
            cell: Cell = self.profile.estimate_cell(kind, micro_batch, tensor)
            self._outputs[key] = np.concatenate([[0.0], cell.output_bytes])
        return self._outputs[key]

    def compute_hops(self, boundary: Boundary, shape: Shape) -> Array:
        """Return the time of a message after e segments. The rows are an activation, a gradient,
        and each of these together with those of all replicas that share the link."""
        key = boundary, shape.micro_batch, shape.tensor
        if key not in self._hops:
            rows = []
            network = self.profile.network
            for forward, together in itertools.product((True, False), (False, True)):
                longest = np.zeros(self.size + 1)
                for route in boundary.routes:
                    ends = (route.sender, route.receiver)
                    link = network.find(*(ends if forward else ends[::-1]), route.where)
                    sent = self.compute_outputs(route.sender, shape.micro_batch, shape.tensor)
                    # Ranks that share layers always send at once.
                    flows = route.flows if together else min(route.flows, shape.tensor)
                    if self.training.split_messages:
                        flows = max(1, flows // shape.tensor)
                    longest = np.maximum(longest, link.compute_times(sent * flows))
                rows.append(longest)
            self._hops[key] = np.array([rows[0], rows[2], rows[1], rows[3]])
        return self._hops[key]

    def compute_sums(self, site: StageSite, shape: Shape) -> Sums:
        """Return the times of a stage's messages between replicas, by its first segment and end."""
        key = site, shape.replicas, shape.tensor, shape.zero
        if key not in self._sums:
            count = self.compute_parameters(shape.tensor)
            network, training = self.profile.network, self.training

            def compute_half(half: Half, bytes_each: float) -> Array:
                return network.compute_half(half, site.group, count * bytes_each, site.sharing)

            nothing = np.zeros_like(count)
            if not shape.shares:
                whole = network.find_all_reduce(
                    site.group, count * training.reduced_bytes, site.sharing
                )
                found = Sums(reduce=whole[0], exchange=nothing, scatter=nothing, gather=nothing)
            else:
                is_whole = shape.shares < 3 and training.deals_whole
                owned = compute_half(
                    "reduce" if is_whole else "reduce_scatter", training.reduced_bytes
                )
                back = compute_half(
                    "broadcast" if is_whole else "all_gather", training.weight_bytes
                )
                found = Sums(
                    reduce=owned if shape.shares == 1 else nothing,
                    exchange=nothing if shape.shares == 3 else back,
                    scatter=nothing if shape.shares == 1 else owned,
                    gather=back if shape.shares == 3 else nothing,
                )
            self._sums[key] = found
        return self._sums[key]

    def compute_fixed(self, shape: Shape) -> Array:
        """Return the bytes that a stage holds at all times."""
        parameters = self.compute_parameters(shape.tensor)
        each = self.training.count_fixed_bytes(shape.zero, shape.replicas)
        fixed = parameters * each + self.training.framework_bytes
        if shape.shares == 3:
            whole = self.training.count_fixed_bytes(2, shape.replicas)  # tied weights stay whole
            fixed = fixed + self._compute_tied(shape.tensor) * (whole - each)
            fixed = fixed + _compute_largest(parameters.diagonal(1)) * self.training.gathered_bytes
        return fixed

    def _compute_tied(self, tensor: int) -> Array:
        """Return, for each range of segments by begin and end, the number of parameters that it
        shares with segments outside, counting each copy."""
        held = np.zeros(self.size)
        for tie in self.profile.model.ties:
            for segment in tie.segments:
                held[segment] += tie.parameters / tensor
        return spread(held)

    def compute_buckets(self, shape: Shape) -> Array:
        if shape.tensor not in self._buckets:
            held = self.compute_parameters(shape.tensor) * self.training.reduced_bytes
            self._buckets[shape.tensor] = np.maximum(1, np.ceil(held / BUCKET_BYTES))
        return self._buckets[shape.tensor]


def spread(values: Array) -> Array:
    """Return the sum of every run of values, by begin and end."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return prefix[None, :] - prefix[:, None]


def _find_widest(spreads: Sequence[Spread | None]) -> Spread | None:
    """Return the widest of several spreads; None if one is not known."""
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads):
        return None
    tables = np.array([(spread.rounds, *spread.actions) for spread in known])
    low = np.array(QUANTILES) < 0.5
    rounds, *actions = np.where(low, tables.min(axis=0), tables.max(axis=0)).tolist()
    return Spread(rounds=tuple(rounds), actions=tuple(map(tuple, actions)))


def _compute_largest(values: Array) -> Array:
    """Return the largest value of every run; 0 for an empty one."""
    size = len(values)
    found = np.zeros((size + 1, size + 1))
    for begin in range(size):
        found[begin, begin + 1 :] = np.maximum.accumulate(values[begin:])
    return found


@dataclass(frozen=True, kw_only=True)
class StageTable:
    """Figures of a stage for each run of consecutive segments that it may hold; inf marks runs that
    are too short or do not fit in memory."""

    times: TimeTables
    kinds: tuple[Array, ...]
    """Costs of F f R B I W, then of O L if used; they include messages that a rank waits for."""
    optimizer: Array
    inputs: Array
    """Bytes that a micro-batch keeps without its graph: inputs, and products for a recompute."""
    graph: Array
    """Bytes that a micro-batch keeps until its backward, including what it sent on."""
    allowed: Array
    work: Array
    """All work of the stage in a step."""
    way: Array
    """A micro-batch's forward, backward, and messages to the next stage and back."""
    way_down: Array
    """A micro-batch's forward and the message to the next stage."""
    puts_off: bool
    beyond: Array
    """Least time of the other micro-batches beyond the `way` of one, whatever other stages do."""
    more_rounds: int
    left: Array
    kept: KeptGraphs | None
    """The choice of graphs to keep, for a stage with `recompute: auto`."""
    is_beyond: Array
    """Runs that fit only because some graphs are recomputed."""


def add_host(
    times: TimeTables, uses: Sequence[int | Array], keeps_products: bool = False
) -> tuple[Array, ...]:
    """Return the costs of F f R B I W with the host's time, by begin and end.

    The host launches ahead of the device, so a delay in one action can be made up in another. A
    stage therefore takes as long as the device or, if the host is slower over all actions, as long
    as the host; the difference is spread over the actions as they are launched.
    """
    names = [FIGURE_OF[kind] for kind in KINDS]
    costs = [times.by_name[name] for name in names]
    if keeps_products:
        costs[KINDS.index("R")] = times.optional["selective_s"]
    if not times.host:
        return tuple(costs)
    launches = [times.host[name] for name in names]
    if keeps_products:
        launches[KINDS.index("R")] = times.optional["selective_host_s"]
    device, host = (
        sum(n * values for n, values in zip(uses, rows, strict=True)) for rows in (costs, launches)
    )
    share = np.divide(host - device, host, out=np.zeros_like(host), where=host > device)
    return tuple(cost + share * launch for cost, launch in zip(costs, launches, strict=True))


def compute_stage(
    tables: Tables,
    shape: Shape,
    site: StageSite,
    before: Boundary | None,
    after: Boundary | None,
    role: Role,
    least: int,
) -> StageTable:
    if tables.training.overlap_sends:
        before = None  # what comes back is then the link's affair
    # Where each micro-batch has sums of its own they depend on more than the kinds of GPU.
    key = shape, site if shape.shares > 1 else site.kinds, before, after, role, least
    found = tables.stages.get(key)
    if found is None:
        tables.forget()
        found = tables.stages[key] = _make(tables, shape, site, before, after, role, least)
    assert isinstance(found, StageTable)
    return found


def _make(
    tables: Tables,
    shape: Shape,
    site: StageSite,
    before: Boundary | None,
    after: Boundary | None,
    role: Role,
    least: int,
) -> StageTable:
    times = tables.compute_times(site.kinds, shape.micro_batch, shape.tensor)
    blocking = not tables.training.overlap_sends
    nothing = np.zeros((4, tables.size + 1))
    out = nothing if after is None else tables.compute_hops(after, shape)
    back = nothing if before is None else tables.compute_hops(before, shape)
    inputs = tables.compute_outputs(site.kinds[0], shape.micro_batch, shape.tensor)
    graph = times.graph_bytes + inputs[None, :]
    fixed = tables.compute_fixed(shape)
    held = np.broadcast_to(inputs[:, None], graph.shape)
    if role.keeps_products:
        held = held + times.optional["kept_bytes"]
    uses: list[int | Array] = list(role.uses)
    kept = None
    if role.keeps_what_fits:
        free = USABLE * (times.memory_bytes / tables.training.memory_share - fixed)
        room = np.minimum(times.memory_bytes - fixed - times.work_bytes, free)
        kept = choose_kept(role.ahead, role.num_microbatches, graph, inputs, room, tables.kept)
        uses[2], fits = kept.counts, kept.fits
    else:
        live = np.max([g * graph + i * held for g, i in role.held], axis=0)
        fits = fixed + live + times.work_bytes <= times.memory_bytes
    all_held = fixed + role.ahead * graph + times.work_bytes
    costs = _find_costs(times, uses, role)
    forward, _, again, both, gradient, weights = costs
    if shape.shares > 1:  # counted in full: how much of it kernels hide no profile says
        sums = tables.compute_sums(site, shape)
        forward, again, gradient = (t + sums.gather for t in (forward, again, gradient))
        both, weights = both + sums.gather + sums.scatter, weights + sums.gather + sums.scatter
    if blocking:
        forward = forward + out[2][None, :]
        gradient, both = (values + back[3][:, None] for values in (gradient, both))
    costs = (forward, forward, again, both, gradient, weights)
    if role.copies:
        copied = np.maximum(0.0, times.graph_bytes - inputs[:, None])
        copies, counts = _find_copies(times, copied, role, dict(zip(KINDS, costs, strict=True)))
        costs, uses = (*costs, *copies), [*uses, *counts]

    begins, ends = np.indices(fits.shape)
    allowed = (ends >= begins + least) & fits

    def mark(values: Array) -> Array:
        return np.where(allowed, values, np.inf)

    work = sum(n * cost for n, cost in zip(uses, costs, strict=True))
    sent = nothing if blocking else out
    m, ahead = role.num_microbatches, min(role.ahead, role.num_microbatches)
    more = np.maximum(0, uses[2] - 1) * again  # but for the first, which may be kept
    rounds = -(-m // max(1, ahead))
    if role.gradients_last:
        # All forwards of all stages come before any gradient.
        beyond = (m - 1) * (np.maximum(forward, sent[2][None, :]) + both) + more
        rounds = 1
    else:
        beyond = (m - 1) * (forward + both) + more - (ahead - 1) * forward
    return StageTable(
        times=times,
        kinds=costs,
        optimizer=times.optimizer / shape.owners,
        inputs=held,
        graph=graph,
        allowed=allowed,
        work=mark(work),
        way=mark(forward + both + (sent[0] + sent[1])[None, :]),
        way_down=mark(forward + sent[0][None, :]),
        puts_off=role.uses[5] > 0,
        beyond=mark(beyond),
        more_rounds=rounds - 1,
        left=(m - 1 - (rounds - 1) * ahead) * both,
        kept=kept,
        is_beyond=allowed & (all_held > times.memory_bytes),
    )


def _find_costs(times: TimeTables, uses: Sequence[int | Array], role: Role) -> tuple[Array, ...]:
    if role.is_least:
        return tuple(times.by_name[FIGURE_OF[kind]] for kind in KINDS)
    costs = add_host(times, uses, role.keeps_products)
    if not (role.keeps_products and times.host):
        return costs
    # While it recomputes, the host may gain on the device: but other actions are no quicker by it.
    without = [0 if kind == "R" else n for kind, n in zip(KINDS, uses, strict=True)]
    return tuple(map(np.maximum, costs, add_host(times, without, role.keeps_products)))


def _find_copies(
    times: TimeTables, copied: Array, role: Role, work: Mapping[Kind, Array]
) -> tuple[list[Array], list[int]]:
    """Return the mean costs of O and L that the work beside them does not hide, and how often each
    kind occurs."""
    found, counts = [], []
    # A segment's own figures are without what came in, which a longer run copies too.
    alone = spread(copied.diagonal(1))
    more = np.maximum(1.0, copied / np.where(alone > 0, alone, np.inf))
    for kind, name in (("O", "offload_s"), ("L", "load_s")):
        took = more * times.optional[name]
        own = [(beside, count) for copy, beside, count in role.copies if copy == kind]
        left = np.zeros_like(took)
        for beside, count in own:
            hidden = sum(work[one] for one in beside) if times.copies_beside else 0.0
            left += count * np.maximum(0.0, took - hidden)
        counts.append(sum(count for _, count in own))
        found.append(left / counts[-1])
    return found, counts

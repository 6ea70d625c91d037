"""Matrices of one stage in its place, by begin and end of its segments; shared by all chains.

What a stage costs depends on its GPUs, the links at both ends, and its role in the schedule: how
often it runs each kind of action, what it holds, how far it runs ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varuna_core.planner.model.compiled import Role
from varuna_core.planner.model.sites import Boundary
from varuna_core.planner.model.tables import Array, Shape, Tables, Times


@dataclass(frozen=True, kw_only=True)
class StageTable:
    """inf marks what a stage may not hold: too little, or more than fits in memory."""

    times: Times
    kinds: tuple[Array, ...]
    """Costs of F f R B I W; with the message where a rank waits for its sends."""
    optimizer: Array
    inputs: Array
    """Bytes of one micro-batch's inputs, by begin."""
    graph: Array
    """Bytes that one micro-batch keeps until its backward: what it sent on among them."""
    allowed: Array
    work: Array
    """All that the stage has to do in a step."""
    way: Array
    """A micro-batch down and back: forward, backward, messages to the next stage and from it."""
    way_down: Array
    """Forward and its message alone."""
    puts_off: bool
    beyond: Array
    """What m micro-batches add to one's way, whatever other stages do; see Behind.find_beyond."""
    more_rounds: int
    left: Array


def find_stage(
    tables: Tables,
    shape: Shape,
    kinds: tuple[str, ...],
    before: Boundary | None,
    after: Boundary | None,
    role: Role,
    least: int,
) -> StageTable:
    if tables.training.overlap_sends:
        before = None  # what comes back is then the link's affair
    key = shape, kinds, before, after, role, least
    found = tables.stages.get(key)
    if found is None:
        tables.forget()
        found = tables.stages[key] = _make(tables, shape, kinds, before, after, role, least)
    assert isinstance(found, StageTable)
    return found


def _make(
    tables: Tables,
    shape: Shape,
    kinds: tuple[str, ...],
    before: Boundary | None,
    after: Boundary | None,
    role: Role,
    least: int,
) -> StageTable:
    times = tables.find_times(kinds, shape.micro_batch, shape.tensor)
    blocking = not tables.training.overlap_sends
    nothing = np.zeros((4, tables.size + 1))
    out = nothing if after is None else tables.find_hops(after, shape)
    back = nothing if before is None else tables.find_hops(before, shape)
    forward, gradient, both = times.forward, times.input_grad, times.backward
    if blocking:
        forward = forward + out[2][None, :]
        gradient, both = (values + back[3][:, None] for values in (gradient, both))
    costs = (forward, forward, times.recompute, both, gradient, times.weight_grad)

    inputs = tables.find_outputs(kinds[0], shape.micro_batch, shape.tensor)
    graph = times.graph_bytes + inputs[None, :]
    live = np.max([g * graph + i * inputs[:, None] for g, i in role.held], axis=0)
    memory = tables.find_fixed(shape) + live + times.work_bytes
    begins, ends = np.indices(memory.shape)
    allowed = (ends >= begins + least) & (memory <= times.memory_bytes)

    def mark(values: Array) -> Array:
        return np.where(allowed, values, np.inf)

    work = sum((n * cost for n, cost in zip(role.uses, costs, strict=True) if n), 0 * forward)
    sent = nothing if blocking else out
    m, ahead = role.num_microbatches, min(role.ahead, role.num_microbatches)
    again = role.uses[2] / m * times.recompute
    rounds = -(-m // max(1, ahead))
    if role.gradients_last:
        # All forwards of all stages come before any gradient.
        beyond = (m - 1) * (np.maximum(forward, sent[2][None, :]) + both + again)
        rounds = 1
    else:
        beyond = (m - 1) * (forward + both + again) - (ahead - 1) * forward
    return StageTable(
        times=times,
        kinds=costs,
        optimizer=times.optimizer / (shape.replicas if shape.zero else 1),
        inputs=inputs,
        graph=graph,
        allowed=allowed,
        work=mark(work),
        way=mark(forward + both + (sent[0] + sent[1])[None, :]),
        way_down=mark(forward + sent[0][None, :]),
        puts_off=role.uses[5] > 0,
        beyond=mark(beyond),
        more_rounds=rounds - 1,
        left=(m - 1 - (rounds - 1) * ahead) * both,
    )

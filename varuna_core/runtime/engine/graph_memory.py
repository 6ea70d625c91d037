"""Measure the memory of a micro-batch's graph once, and the memory that a rank has for graphs.

`recompute="auto"` recomputes everything in the first step and measures each stage's first graph in
that step: tensors saved by autograd, received and sent. In the next step gradients and optimizer
state are already allocated, so micro-batches may use the remaining memory of the GPU. The ranks
agree on the figures, so that all build the same schedule.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.comm.values import Crossing, tensors_of
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.split.stage import Stage
from varuna_core.schedule.recompute import USABLE, Memory


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collector within the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphMeter:
    """Measures the first graph of each stage of a rank."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.graphs: dict[int, float] = {}
        self.inputs: dict[int, float] = {}
        self.kept: dict[int, float] = {}
        """Bytes that a forward keeps for its recompute, besides its inputs, by stage."""

    def run(
        self,
        stage: Stage,
        micro: MicroBatch,
        received: Crossing | None,
        on_segment: Callable[[int], None],
    ) -> Any:
        """Run the stage's forward with a graph, and measure the stage's first graph if torch
        supports this; otherwise this rank's memory stays unknown."""
        is_unhooked = not stage.record.unhooked.isdisjoint(stage.segments)
        if stage.index in self.graphs or is_unhooked:
            return stage.forward(micro.inputs, received, on_segment)
        if stage.stubs:
            stage.plan_for(micro.inputs)  # a dry run of a new shape saves tensors too, fake ones
        incoming = measure_storages([] if received is None else received.tensors)
        held: dict[int, int] = {}
        known = measure_storages([*stage.module.parameters(), *stage.module.buffers()])
        known |= measure_storages(tensors_of(micro.inputs))

        def note(tensor: Tensor) -> Tensor:
            held.update(measure_storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = stage.forward(micro.inputs, received, on_segment)
        held |= measure_storages(
            output.tensors if isinstance(output, Crossing) else tensors_of(output)
        )
        held |= incoming
        scale = self._compute_scale(micro)
        self.inputs[stage.index] = scale * sum(incoming.values())
        self.graphs[stage.index] = scale * sum(held[key] for key in held.keys() - known.keys())
        return output

    def note_kept(self, stage: Stage, micro: MicroBatch, tensors: Iterable[Tensor]) -> None:
        held = sum(measure_storages(tensors).values())
        self.kept.setdefault(stage.index, self._compute_scale(micro) * held)

    def _compute_scale(self, micro: MicroBatch) -> float:
        return max(1.0, self.chunk_size / micro.size)


def measure_storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each distinct storage, keyed by the storage."""
    found: dict[int, int] = {}
    for held in tensors:
        tensor = _pick_memory(held)
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def _pick_memory(held: Any) -> Any:
    """Return the tensor that owns the memory: a DTensor's local shard, or the result of a
    collective (torch 2.13)."""
    if hasattr(held, "to_local"):
        with torch.no_grad():
            held = held.to_local()
    return getattr(held, "elem", held)


def compute_limit(device: torch.device, parameters: Iterable[nn.Parameter]) -> float:
    """Return the bytes of a GPU for micro-batches: free memory minus unallocated gradients."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    gradients = sum(
        p.numel() * p.itemsize for p in parameters if p.requires_grad and p.grad is None
    )
    return USABLE * (free + cached) - gradients


def agree_on_memory(meter: GraphMeter, limit: float, links: Links) -> Memory | None:
    """Return the largest graphs and the least memory over all replicas; None if any are unknown."""
    stages, depth = links.stage_map.num_stages, links.stage_map.depth
    figures = torch.full((2 * stages + depth,), -torch.inf, dtype=torch.float64)
    for stage, graph in meter.graphs.items():
        kept = meter.inputs[stage] + meter.kept.get(stage, 0.0)
        figures[stage], figures[stages + stage] = graph, kept
    figures[2 * stages + links.place] = -limit
    for group in (links.replicas, links.pipeline):
        if group is not None:
            dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group)
    if bool(figures.isinf().any()):
        return None
    agreed = figures.tolist()
    return Memory(
        graphs=tuple(agreed[:stages]),
        inputs=tuple(agreed[stages : 2 * stages]),
        limits=tuple(-limit for limit in agreed[2 * stages :]),
    )

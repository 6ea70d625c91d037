"""Run a micro-batch's pass through a stage, with a class for each source of the backward's graph.

```
PlainPass        F ───────────────────────────────── B    autograd's graph, in memory
├ RecordedPass   F ───────────────────────────────── B    CUDA graphs instead of autograd's
├ OffloadedPass  F ─► O ─ ─ ─ ─ elsewhere ─ ─ ─ L ─► B
└ RecomputePass  f ─ ─ ─ inputs and buffers ─ ─ R ─► B
  └ SelectivePass  f ─ ─ and matrix products ─ ─ R ► B
```

Every backward may be split (I, W) except a recorded one, which computes all gradients at once. So
`Passes` records only passes that end in a B, and no offloaded passes, since a recording keeps its
memory.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import gt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from varuna_core.runtime.comm.values import Crossing, tensors_of
from varuna_core.runtime.engine.buffers import ChangingBuffers
from varuna_core.runtime.engine.cuda_graphs import CudaGraphs, Recording
from varuna_core.runtime.engine.graph_memory import GraphMeter, measure_storages
from varuna_core.runtime.engine.graph_offload import Place, SavedGraph, choose_place
from varuna_core.runtime.engine.kept_products import KeptProducts
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.engine.weight_grads import PutOffProduct, WeightGrads
from varuna_core.runtime.split.stage import Stage
from varuna_core.schedule.actions import Action, Kind, ScheduleError

log = logging.getLogger(__name__)

Gradients = Sequence[Tensor | None]
"""A gradient for each tensor that crossed a cut; None if the tensor needs none."""

Pairs = Sequence[tuple[Any, Tensor]]
"""Tensors or graph edges that a backward starts from, with their gradients."""


@dataclass(kw_only=True, slots=True)
class Turn:
    """One micro-batch on one stage."""

    stage: Stage
    number: int
    micro: MicroBatch
    on_segment: Callable[[int], None]
    """Seeds the random streams of a segment (random_streams.py)."""

    received: Crossing | None = None

    def start_streams(self) -> None:
        """Seed the random stream of segment 0 for model code that runs before the stage."""
        if not self.stage.is_first:
            self.on_segment(0)

    def run(self) -> Any:
        """Run the stage; return the values that cross the cut after it, or the model's output."""
        return self.stage.forward(self.micro.inputs, self.received, self.on_segment)


class Pass(ABC):
    """One turn from its forward to its last gradient, executed by the actions of a schedule."""

    def __init__(self, turn: Turn, passes: Passes) -> None:
        self.turn, self.passes = turn, passes
        self.output: Any = None
        """The loss, or the values that crossed the cut, from which the backward starts."""

        self.products: Sequence[PutOffProduct] = ()
        """Products that an I has left for its W."""

    @abstractmethod
    def forward(self) -> Any:
        """Run the stage's forward (actions F and f)."""

    def output_ready(self, output: Any) -> None:
        """Keep the forward's output, after it was sent or its loss computed."""
        self.output = output

    def recompute(self) -> Any:
        """Run the stage again, now keeping the graph (action R)."""
        raise self._refuse("R")

    def offload(self) -> None:
        """Start to copy the graph out of device memory (action O)."""
        raise self._refuse("O")

    def load(self) -> None:
        """Start to copy the offloaded graph back to the device (action L)."""
        raise self._refuse("L")

    @abstractmethod
    def pair(self, gradients: Gradients) -> Pairs:
        """Return the tensors that the backward starts from, with their received gradients."""

    @abstractmethod
    def backward(self, pairs: Pairs, gradients: Gradients) -> Gradients:
        """Compute all gradients, and return those of received tensors (action B). `gradients` holds
        all received gradients, also those of outputs that no backward starts from."""

    @abstractmethod
    def backward_inputs(self, pairs: Pairs, gradients: Gradients) -> Gradients:
        """Compute the gradients of received tensors, and postpone the products for weights (action
        I)."""

    @abstractmethod
    def backward_weights(self) -> None:
        """Compute the postponed products for weights (action W)."""

    def _refuse(self, kind: Kind) -> ScheduleError:
        action = Action(kind, self.turn.stage.index, self.turn.number)
        return ScheduleError(f"{action}: a {type(self).__name__} has no {kind}")


class PlainPass(Pass):
    """A pass whose forward keeps its graph."""

    def forward(self) -> Any:
        return self._run()

    def _run(self) -> Any:
        turn, meter = self.turn, self.passes.meter
        if meter is not None and torch.is_grad_enabled():
            return meter.run(turn.stage, turn.micro, turn.received, turn.on_segment)
        return turn.run()

    def pair(self, gradients: Gradients) -> Pairs:
        return [
            (start, gradient)
            for start, gradient in zip(self._list_starts(), gradients, strict=True)
            if gradient is not None and _has_graph(start)
        ]

    def _list_starts(self) -> Sequence[Any]:
        starts: Sequence[Any] = self.output.tensors
        return starts

    def backward(self, pairs: Pairs, gradients: Gradients) -> Gradients:
        if pairs:
            torch.autograd.backward([start for start, _ in pairs], [g for _, g in pairs])
        received = self.turn.received
        return () if received is None else tuple(t.grad for t in received.tensors)

    def backward_inputs(self, pairs: Pairs, gradients: Gradients) -> Gradients:
        with self.passes.weight_grads.collecting() as products:
            entered = self.backward(pairs, gradients)
        self.products = products
        self.turn.received = self.output = None
        return entered

    def backward_weights(self) -> None:
        for product in self.products:
            product()


class RecordedPass(PlainPass):
    """A pass that replays CUDA graphs; before they exist, it collects what recording needs."""

    recording: Recording | None = None
    key: Any = None
    """Key of the CUDA graphs that this pass may use."""

    def forward(self) -> Any:
        turn, graphs = self.turn, self._graphs
        self.key = graphs.find_key(turn.stage, turn.micro, turn.received)
        self.recording = graphs.find(self.key, turn.micro, turn.received)
        if self.recording is None:
            return super().forward()
        return self.recording.forward(turn.micro.inputs, turn.received)

    def backward(self, pairs: Pairs, gradients: Gradients) -> Gradients:
        if self.recording is None:
            self._graphs.learn(self.key, gradients)
            return super().backward(pairs, gradients)
        seeds = [gradient for _, gradient in pairs]
        return self._graphs.run_backward(self.key, self.recording, seeds, gradients)

    @property
    def _graphs(self) -> CudaGraphs:
        assert self.passes.graphs is not None
        return self.passes.graphs


class OffloadedPass(PlainPass):
    """A pass whose graph leaves the device's memory between its forward and its backward."""

    def forward(self) -> Any:
        self.graph = self.passes.open_graph(self.turn)
        with self.graph.saving():
            return super().forward()

    def offload(self) -> None:
        self.graph.offload(self.passes.choose_place())
        if not self.turn.stage.is_last:  # what was sent is not held for its gradient
            self.output = [
                get_gradient_edge(sent) if sent.requires_grad else None
                for sent in self.output.tensors
            ]

    def load(self) -> None:
        self.graph.load()

    def _list_starts(self) -> Sequence[Any]:
        return self.output if isinstance(self.output, list) else super()._list_starts()

    def backward(self, pairs: Pairs, gradients: Gradients) -> Gradients:
        self.graph.wait()
        return super().backward(pairs, gradients)


class RecomputePass(PlainPass):
    """A pass that saves its forward's inputs, and rebuilds the graph before the backward."""

    def forward(self) -> Any:
        changing = self.passes.buffers[self.turn.stage.index]
        self.buffers, self.attributes = changing.copy(), changing.keep_attributes()
        self._versions = self._list_versions()
        return super().forward()

    def output_ready(self, output: Any) -> None:
        if self._versions != self._list_versions():
            self.turn.stage.refuse_change()
        self._learning = list_learning(output)

    def _list_versions(self) -> list[int]:
        received = self.turn.received
        return [] if received is None else [tensor._version for tensor in received.tensors]

    def recompute(self) -> Any:
        self.turn.start_streams()
        changing = self.passes.buffers[self.turn.stage.index]
        with changing.replaced_by(self.buffers), changing.attributes_as(self.attributes):
            output = self._run()
        if any(map(gt, list_learning(output), self._learning)):
            self.turn.stage.refuse_learning()
        self.buffers.clear()
        return output


class SelectivePass(RecomputePass):
    """A recomputing pass that also saves its forward's matrix products and reuses them."""

    def forward(self) -> Any:
        self.turn.stage.foresee(self.turn.micro.inputs)
        self.kept = KeptProducts()
        with self.kept.keeping():
            return super().forward()

    def output_ready(self, output: Any) -> None:
        if self.passes.meter is not None:
            turn = self.turn
            self.passes.meter.note_kept(turn.stage, turn.micro, self.kept.list_tensors())
        super().output_ready(output)

    def recompute(self) -> Any:
        """Run the stage with the saved products, or compute everything if the products differ."""
        stage, saved = self.turn.stage, self.buffers
        self.buffers = {name: buffer.clone() for name, buffer in saved.items()}
        with self.kept.serving():
            output = super().recompute()
        if self.kept.is_alike:
            return output
        self.buffers = saved
        if stage.index in self.passes.selective:
            self.passes.selective.remove(stage.index)
            log.warning(
                "stage %d: recompute='full' replaces 'selective', since the recompute runs other "
                "matrix products than the forward",
                stage.index,
            )
        return super().recompute()


class Passes:
    """Creates the passes of one rank's stages, and holds the state that they share."""

    def __init__(
        self,
        stages: Sequence[Stage],
        weight_grads: WeightGrads | None = None,
        *,
        meter: GraphMeter | None = None,
        graphs: CudaGraphs | None = None,
        is_selective: bool = False,
    ) -> None:
        """If `is_selective`, recomputes reuse matrix products."""
        self.device = stages[0].device
        self.weight_grads = weight_grads or WeightGrads()
        self.meter, self.graphs = meter, graphs
        self.buffers = {stage.index: ChangingBuffers(stage) for stage in stages}
        self.selective = set[int]()
        """Stages whose products are saved for a recompute."""

        for stage in stages if is_selective else ():
            if (stage.record.composed | stage.record.unhooked).isdisjoint(stage.segments):
                self.selective.add(stage.index)
            else:
                log.warning(
                    "stage %d: recompute='full' replaces 'selective', since the operations "
                    "within torch.func.grad, flex attention and the like cannot be observed",
                    stage.index,
                )
        self._recordable: Collection[tuple[int, int]] = ()
        self._offloaded: Collection[tuple[int, int]] = ()
        self._staying: dict[int, set[int]] = {}
        """The storages of each stage's parameters and buffers in a step."""

        self._place: Place | None = None

    def begin_step(self, actions: Sequence[Action], *, may_record: bool) -> None:
        """Choose how each forward and backward of the step runs: plainly, recorded, offloaded or
        with recompute. With `may_record`, new CUDA graphs may be recorded."""
        self._staying.clear()
        self._offloaded = {(a.stage, a.microbatch) for a in actions if a.kind == "O"}
        self._recordable = set[tuple[int, int]]()
        if self.graphs is not None and may_record:
            self.graphs.begin_step()
            whole = {(a.stage, a.microbatch) for a in actions if a.kind == "B"}
            self._recordable = whole - self._offloaded

    def make(self, kind: Kind, turn: Turn) -> Pass:
        """Return the pass that begins with this F or f."""
        key = turn.stage.index, turn.number
        if kind == "f":
            is_selective = turn.stage.index in self.selective
            return SelectivePass(turn, self) if is_selective else RecomputePass(turn, self)
        if key in self._offloaded:
            return OffloadedPass(turn, self)
        if key in self._recordable:
            return RecordedPass(turn, self)
        return PlainPass(turn, self)

    def open_graph(self, turn: Turn) -> SavedGraph:
        """Return an empty graph for offload; it skips tensors that stay in memory anyway."""
        stage = turn.stage
        stage.foresee(turn.micro.inputs)
        if stage.index not in self._staying:
            held = [*stage.module.parameters(), *stage.module.buffers()]
            self._staying[stage.index] = {*measure_storages(held)}
        crossed = () if turn.received is None else turn.received.tensors
        entering = measure_storages([*tensors_of(turn.micro.inputs), *crossed])
        return SavedGraph(device=self.device, staying=self._staying[stage.index] | entering.keys())

    def choose_place(self) -> Place:
        """Return the memory or files to which graphs of this rank are copied."""
        if self._place is None:
            self._place = choose_place(self.device)
        return self._place


def list_learning(output: Any) -> Sequence[bool]:
    """List, for each tensor of an output that crosses a cut, if it requires grad; return an empty
    list for other outputs, and if the dry run determines the answer."""
    structure = output.structure if isinstance(output, Crossing) else None
    return (structure and structure.learning) or ()


def _has_graph(start: Tensor | GradientEdge | None) -> bool:
    return start.requires_grad if isinstance(start, Tensor) else start is not None

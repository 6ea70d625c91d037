"""Executes one rank's list of schedule actions on micro-batches.

```
F  take an activation, forward, send        f  the same, without a graph
R  forward again, with a graph              B  take a gradient, backward, send
I  as B, weight gradients put off           W  make those
O  copy the graph of an F out of memory     L  copy it back
```

The loss is summed on its device and not read; a TokenMean's sums and counts are, each by itself.
Buffers that a forward changes (batch norm) change
once a micro-batch: a recompute sees them as its forward did and leaves no trace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from varuna_core.runtime.comm.channel import ReceivingEnd, SendingEnd
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.comm.values import Crossing, tensors_of
from varuna_core.runtime.engine.adapting import ActionTimes
from varuna_core.runtime.engine.cuda_graphs import CudaGraphs, Recording
from varuna_core.runtime.engine.graph_memory import GraphMeter, measure_storages
from varuna_core.runtime.engine.graph_offload import Place, SavedGraph, find_place
from varuna_core.runtime.engine.kept_products import KeptProducts
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.engine.random_streams import build_seeder
from varuna_core.runtime.engine.weight_grads import PutOffProduct, WeightGrads
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import LossForm, TokenMean, find_loss
from varuna_core.runtime.split.stage import Stage
from varuna_core.schedule.actions import FORWARDS, Action
from varuna_core.schedule.order import run_ahead

log = logging.getLogger(__name__)

Trace = Callable[[str, float, float, float], None]
"""Called after an action: its spelling, then when it began, had its message, and ended (seconds
of `time.perf_counter`)."""

BeforeGradients = Callable[[Sequence[nn.Parameter], Sequence[PutOffProduct] | None], None]
"""Called before each action that makes gradients of parameters, with those that it is the last one
for, and with the products of a W (else None)."""


Keep = Callable[[int, Any], None]
"""Called with the number of a micro-batch and what the model has returned for it, once each."""


@dataclass(kw_only=True)
class HeldMicroBatch:
    """The data a stage keeps of one micro-batch until its backward."""

    received: Crossing | None
    output: Any = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    work: list[PutOffProduct] = field(default_factory=list)
    recording_key: Any = None
    """The recordings that it may use have this key."""

    recording: Recording | None = None
    graph: SavedGraph | None = None
    """What autograd has saved, where that is to leave the device's memory."""

    products: KeptProducts | None = None
    """Of an `f`, for its `R`."""


@dataclass(kw_only=True)
class ConnectedStage:
    """A stage of the rank with its channels. A channel is None at the ends of the pipeline, and to
    a stage of the same rank."""

    stage: Stage
    is_first: bool
    is_last: bool
    changing: list[str]
    activations_in: ReceivingEnd | None
    gradients_in: ReceivingEnd | None
    activations_out: SendingEnd | None
    gradients_out: SendingEnd | None


def connect_stage(stage: Stage, links: Links) -> ConnectedStage:
    """Find the channels to the ranks that hold the stages before and after this one."""
    placement, index = links.stage_map.placement, stage.index
    before = placement[index - 1] if index else None
    after = placement[index + 1] if index + 1 < len(placement) else None
    return ConnectedStage(
        stage=stage,
        is_first=before is None,
        is_last=after is None,
        changing=stage.list_changing(),
        activations_in=links.activations_in.get(before) if before is not None else None,
        gradients_out=links.gradients_out.get(before) if before is not None else None,
        activations_out=links.activations_out.get(after) if after is not None else None,
        gradients_in=links.gradients_in.get(after) if after is not None else None,
    )


class Engine:
    """Runs one rank's stages."""

    def __init__(
        self,
        stages: Sequence[Stage],
        links: Links,
        *,
        seed: int,
        trace: Trace | None = None,
        weight_grads: WeightGrads | None = None,
        before_gradients: BeforeGradients | None = None,
        after_gradients: Callable[[], None] = lambda: None,
        meter: GraphMeter | None = None,
        split_weight: Callable[[float, float], float] | None = None,
        loss: LossForm | None = None,
        times: ActionTimes | None = None,
        graphs: CudaGraphs | None = None,
        keeps_products: bool = False,
    ) -> None:
        """`after_gradients` is called after each B and each W; `loss` is what the model returns.

        `split_weight` makes of the weight of a micro-batch and the loss scale what the loss's
        backward starts from; it is called before gradients are made, on every stage. Without it
        that is their product. A TokenMean's weights are not split. With `keeps_products` matrix
        products are not computed again.
        """
        self.links, self.seed, self.trace = links, seed, trace
        self.loss_form = loss or LossForm()
        self.stages = {stage.index: connect_stage(stage, links) for stage in stages}
        self.holds_last = any(connected.is_last for connected in self.stages.values())
        self.device = stages[0].device
        wake_autograd(self.device)
        self.weight_grads = weight_grads or WeightGrads()
        self.before_gradients, self.after_gradients = before_gradients, after_gradients
        self.meter, self.split_weight = meter, split_weight
        self.times = times
        self.graphs = graphs
        self.keeping = {*self.stages} if keeps_products else set[int]()
        """Stages whose products are kept for a recompute."""

        self._recorded: CudaGraphs | None = None
        """`graphs` while it is a step whose outputs nobody keeps."""

        self._whole: set[tuple[int, int]] = set()
        """Micro-batches of stages whose backward is not split."""

        self._offloaded: set[tuple[int, int]] = set()
        """Micro-batches of stages whose graphs leave the memory."""

        self._place: Place | None = None
        """Where they are copied."""

        self._staying: dict[int, set[int]] = {}
        """The storages of each stage's parameters and buffers in a step."""

        self._noting: ActionTimes | None = None
        """`times` while it is a training step."""
        self._held: dict[tuple[int, int], HeldMicroBatch] = {}
        self._handed: dict[tuple[bool, int, int], Crossing] = {}
        self._step = self._total = 0
        self._loss_scale = 1.0
        self._count: Callable[[], int] | None = None
        self._weigh: Callable[[], Sequence[float]] | None = None
        self._keep: Keep | None = None
        self._ready = 0.0
        self._now: Callable[[], float] = getattr(trace, "now", time.perf_counter)
        """A writer's, which tells what the device does until then too."""
        self.done_s = 0.0
        """When the last action of a step was done, by `time.perf_counter`."""

    def find_last(self) -> nn.Module | None:
        """The module of the last stage, if this rank holds it."""
        return next((c.stage.module for c in self.stages.values() if c.is_last), None)

    def run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[MicroBatch],
        step: int,
        count: Callable[[], int],
        *,
        loss_scale: float = 1.0,
        ahead: int = 0,
        weigh: Callable[[], Sequence[float]] | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        """The sum over the samples of this rank's losses (0 without the last stage); of a
        TokenMean its `totals`, added up.

        `count` gives the samples of the global batch; it is asked as late as possible. So is
        `weigh`, for the weight of each of a TokenMean's sums. The loss is multiplied by
        `loss_scale` before its backward. So many forwards `ahead` may be run before their turn
        when a gradient is late.
        """
        self._start(step)
        self._noting = self.times if actions else None
        if self._noting is not None:
            self._noting.begin(len(microbatches))
        self._count, self._total, self._loss_scale = count, 0, loss_scale
        self._weigh, self._keep = weigh, keep
        self._offloaded = {(a.stage, a.microbatch) for a in actions if a.kind == "O"}
        self._recorded = self.graphs if keep is None else None
        if self._recorded is not None:
            self._recorded.begin_step()
            # A recorded backward makes all gradients at once, and a recording keeps its memory.
            self._whole = {(a.stage, a.microbatch) for a in actions if a.kind == "B"}
            self._whole -= self._offloaded
        run = {"F": self._forward, "f": self._forward_only, "R": self._recompute}
        run |= {"B": self._backward, "I": self._backward_inputs, "W": self._backward_weights}
        run |= {"O": self._offload, "L": self._load}
        actions = tuple(actions)
        finishing = self._list_finishing(actions) if self.before_gradients is not None else {}
        self.weight_grads.adding, begun = self.before_gradients is None, set[int]()
        order: Iterable[Action] = actions
        if ahead:
            order = run_ahead(actions, ahead, self._has_come, self._wait_for_either)
        for action in order:
            begin = self._ready = time.perf_counter()
            number, connected = action.microbatch, self.stages[action.stage]
            if self.before_gradients is not None and action.kind in "BIW":
                held = self._held[action.stage, number]
                last_for = finishing.get(action, [])
                self.before_gradients(last_for, held.work if action.kind == "W" else None)
                # Seen by autograd's hooks are the first ones, which teach what to wait for, and
                # the last, which are waited for.
                self.weight_grads.adding = action.stage in begun and not last_for
                begun.add(action.stage)
            run[action.kind](connected, number, microbatches[number])
            if self.trace is not None:
                self.trace(str(action), begin, self._ready, time.perf_counter())
            if self._noting is not None:
                self._noting.add(action.kind, action.stage, self._ready, time.perf_counter())
        self._noting = None
        self.done_s = time.perf_counter()
        self.links.flush()
        return self._loss

    def _list_finishing(self, actions: Sequence[Action]) -> dict[Action, list[nn.Parameter]]:
        """The parameters that have all their gradients after an action; these keep their order."""
        if not actions:  # no samples for this replica
            return {}
        last = {a.stage: place for place, a in enumerate(actions) if a.kind in "BIW"}
        final: dict[nn.Parameter, int] = {}
        for index, connected in self.stages.items():
            for parameter in connected.stage.parameters().values():
                final[parameter] = max(final.get(parameter, 0), last.get(index, 0))
        finishing: dict[Action, list[nn.Parameter]] = {}
        for parameter, place in final.items():
            finishing.setdefault(actions[place], []).append(parameter)
        return finishing

    def evaluate(
        self,
        actions: Iterable[Action],
        microbatches: Sequence[MicroBatch],
        step: int,
        keep: Keep | None = None,
    ) -> Tensor:
        """The forwards among the actions, alone; the sum over the samples of the losses.

        With `keep` what the model returns need hold no loss.
        """
        self._start(step)
        self._keep = None
        with torch.no_grad(), self._buffers_of_first():
            for action in actions:
                if action.kind in FORWARDS:
                    connected, number = self.stages[action.stage], action.microbatch
                    on_segment = self._start_streams(connected, microbatches[number])
                    received = self._take_activation(connected, number)
                    output = self._call(connected, microbatches[number], received, on_segment)
                    if connected.is_last and keep is not None:
                        keep(number, output)
                    else:
                        self._pass_on(connected, number, output, microbatches[number])
        self.links.flush()
        return self._loss

    def _start(self, step: int) -> None:
        self._step = step
        self._noting = None
        self._held.clear()
        self._handed.clear()
        self._staying.clear()
        terms = self.loss_form.num_terms
        shape = (terms, 2) if terms else ()
        self._loss = torch.zeros(shape, dtype=torch.float64, device=self.device)

    # Forwards.

    def _forward(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        on_segment = self._start_streams(connected, micro)
        received = self._take_activation(connected, number)
        held = HeldMicroBatch(received=received)
        if self._recorded is not None and (connected.stage.index, number) in self._whole:
            held.recording_key = self._recorded.find_key(connected.stage, micro, received)
            held.recording = self._recorded.find(held.recording_key, micro, received)
        if held.recording is not None:
            output = held.recording.forward(micro.inputs, received)
        else:
            if (connected.stage.index, number) in self._offloaded:
                held.graph = self._open_graph(connected.stage, micro, received)
            with nullcontext() if held.graph is None else held.graph.saving():
                output = self._call(connected, micro, received, on_segment)
        held.output = self._pass_on(connected, number, output, micro)
        self._held[connected.stage.index, number] = held

    def _forward_only(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        on_segment = self._start_streams(connected, micro)
        received = self._take_activation(connected, number)
        held = HeldMicroBatch(received=received, buffers=self._copy_buffers(connected))
        versions = [] if received is None else [t._version for t in received.tensors]
        keeping: AbstractContextManager[None] = nullcontext()
        if connected.stage.index in self.keeping:
            self._foresee(connected.stage, micro)
            held.products = KeptProducts()
            keeping = held.products.keeping()
        with torch.no_grad():
            with keeping:
                output = self._call(connected, micro, received, on_segment)
            self._pass_on(connected, number, output, micro)
        if held.products is not None and self.meter is not None:
            self.meter.note_kept(connected.stage, micro, held.products.list_tensors())
        if received is not None and versions != [t._version for t in received.tensors]:
            connected.stage.refuse_change()
        self._held[connected.stage.index, number] = held

    def _recompute(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        held = self._held[connected.stage.index, number]
        output = None if held.products is None else self._recompute_between(connected, micro, held)
        if output is None:
            on_segment = self._start_streams(connected, micro)
            with self._buffers_as(connected, held.buffers):
                output = self._call(connected, micro, held.received, on_segment)
        held.buffers.clear()
        held.output = find_loss(output, self.loss_form.path) if connected.is_last else output

    def _recompute_between(
        self, connected: ConnectedStage, micro: MicroBatch, held: HeldMicroBatch
    ) -> Any:
        """What the forward gives with the products that were kept; None if it makes others."""
        products, held.products = held.products, None
        assert products is not None
        buffers = {name: buffer.clone() for name, buffer in held.buffers.items()}
        on_segment = self._start_streams(connected, micro)
        with self._buffers_as(connected, buffers), products.serving():
            output = self._call(connected, micro, held.received, on_segment)
        if products.is_alike:
            return output
        if connected.stage.index in self.keeping:
            self.keeping.remove(connected.stage.index)
            log.warning(
                "stage %d: its forward makes other matrix products when it is run again: "
                "recompute='selective' is 'full' there",
                connected.stage.index,
            )
        return None

    def _foresee(self, stage: Stage, micro: MicroBatch) -> None:
        """Make the dry run of a new shape, if there must be one, where nobody watches."""
        if stage.stubs:
            stage.plan_for(micro.inputs)

    def _open_graph(self, stage: Stage, micro: MicroBatch, received: Crossing | None) -> SavedGraph:
        self._foresee(stage, micro)
        if stage.index not in self._staying:
            held = [*stage.module.parameters(), *stage.module.buffers()]
            self._staying[stage.index] = {*measure_storages(held)}
        crossed = () if received is None else received.tensors
        entering = measure_storages([*tensors_of(micro.inputs), *crossed])
        return SavedGraph(device=self.device, staying=self._staying[stage.index] | entering.keys())

    def _offload(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        held = self._held[connected.stage.index, number]
        assert held.graph is not None
        if self._place is None:
            self._place = find_place(self.device)
        held.graph.offload(self._place)
        if not connected.is_last:  # what was sent is not held for its gradient
            held.output = [
                get_gradient_edge(sent) if sent.requires_grad else None
                for sent in held.output.tensors
            ]

    def _load(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        graph = self._held[connected.stage.index, number].graph
        assert graph is not None
        graph.load()

    def _start_streams(self, connected: ConnectedStage, micro: MicroBatch) -> Callable[[int], None]:
        """Before a forward waits for its message: it takes as long as a small one."""
        on_segment = build_seeder(self.seed, self._step, micro.first_sample, self.device)
        if not connected.is_first:
            on_segment(0)  # code before the stage draws too, from the first segment's stream
        return on_segment

    def _call(
        self,
        connected: ConnectedStage,
        micro: MicroBatch,
        received: Crossing | None,
        on_segment: Callable[[int], None],
    ) -> Any:
        if self.meter is not None and torch.is_grad_enabled():
            return self.meter.run(connected.stage, micro, received, on_segment)
        return connected.stage.forward(micro.inputs, received, on_segment)

    def _take_activation(self, connected: ConnectedStage, number: int) -> Crossing | None:
        if connected.is_first:
            return None
        return self._take(connected.activations_in, (True, connected.stage.index, number))

    def _pass_on(
        self, connected: ConnectedStage, number: int, output: Any, micro: MicroBatch
    ) -> Any:
        """Send what crosses, or add up the loss; what the backward starts from."""
        if connected.is_last:
            if self._keep is not None:
                self._keep(number, output)
            return self._add_loss(find_loss(output, self.loss_form.path), micro)
        self._send(connected.activations_out, (True, connected.stage.index + 1, number), output)
        return output

    def _add_loss(self, loss: Tensor | TokenMean, micro: MicroBatch) -> Tensor | TokenMean:
        terms = len(loss.terms) if isinstance(loss, TokenMean) else 0
        if terms != self.loss_form.num_terms:
            raise SplitError(
                f"the loss has {terms} TokenMeans, and in the dry run it had "
                f"{self.loss_form.num_terms}: give dummy_inputs that the model makes its loss of, "
                "and return it in one form"
            )
        if isinstance(loss, TokenMean):
            self._loss.add_(loss.totals())
        else:
            self._loss.add_(loss.detach(), alpha=micro.size)
        return loss

    # Messages: through a channel, or handed over to another stage of the rank.

    def _find_channel(self, action: Action) -> ReceivingEnd | None:
        connected = self.stages[action.stage]
        return connected.activations_in if action.kind in FORWARDS else connected.gradients_in

    def _has_come(self, action: Action) -> bool:
        channel = self._find_channel(action)
        return channel is None or channel.is_there()

    def _wait_for_either(self, *actions: Action) -> None:
        channels = map(self._find_channel, actions)
        self.links.arrivals.wait([channel for channel in channels if channel is not None])

    def _take(self, channel: ReceivingEnd | None, key: tuple[bool, int, int]) -> Crossing:
        if channel is None:
            return self._handed.pop(key)
        received = channel.take()
        self._ready = self._now()
        if self._noting is not None:
            self._noting.has_come(key, channel.came_s)
        return received

    def _send(
        self, channel: SendingEnd | None, key: tuple[bool, int, int], crossing: Crossing
    ) -> None:
        if channel is not None:
            if self._noting is not None:
                self._noting.has_left(key, time.perf_counter())
            channel.send(crossing.tensors, crossing.structure)
            return
        # Tensors of their own, on the same memory: the next stage collects gradients in them.
        detached = tuple(None if t is None else t.detach() for t in crossing.tensors)
        self._handed[key] = crossing._replace(tensors=detached)

    # Backwards.

    def _backward(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        self._run_backward(
            connected, number, self._held.pop((connected.stage.index, number)), micro
        )
        self.after_gradients()

    def _backward_inputs(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        held = self._held[connected.stage.index, number]
        self.weight_grads.putting_off = True
        try:
            self._run_backward(connected, number, held, micro)
        finally:
            self.weight_grads.putting_off = False
        held.work = self.weight_grads.take()
        held.received = held.output = None

    def _backward_weights(self, connected: ConnectedStage, number: int, micro: MicroBatch) -> None:
        if self.split_weight is not None:
            self._split_weight(micro)
        for work in self._held.pop((connected.stage.index, number)).work:
            work()
        self.after_gradients()

    def _run_backward(
        self, connected: ConnectedStage, number: int, held: HeldMicroBatch, micro: MicroBatch
    ) -> None:
        gradients: Sequence[Tensor | None] = ()
        pairs: Sequence[tuple[Any, Tensor]]  # tensors, or edges of a graph
        if connected.is_last:
            pairs = self._seed_loss(held.output, micro)
        else:
            if self.split_weight is not None:
                self._split_weight(micro)
            gradients = self._take(
                connected.gradients_in, (False, connected.stage.index, number)
            ).tensors
            sent = held.output.tensors if isinstance(held.output, Crossing) else held.output
            pairs = [
                (start, gradient)
                for start, gradient in zip(sent, gradients, strict=True)
                if gradient is not None and _has_graph(start)
            ]
        if held.graph is not None:
            held.graph.wait()
        made: Sequence[Tensor | None] = ()
        if held.recording is not None and self._recorded is not None:
            made = self._recorded.run_backward(
                held.recording_key, held.recording, [start for _, start in pairs], gradients
            )
        else:
            if self._recorded is not None:
                self._recorded.learn(held.recording_key, gradients)
            if pairs:
                torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])
            if held.received is not None:
                made = tuple(t.grad for t in held.received.tensors)
        if not connected.is_first:
            self._send(
                connected.gradients_out,
                (False, connected.stage.index - 1, number),
                Crossing(tuple(made), None),  # type: ignore[arg-type]
            )

    def _seed_loss(
        self, loss: Tensor | TokenMean, micro: MicroBatch
    ) -> list[tuple[Tensor, Tensor]]:
        """What its backward starts from, and with which gradients."""
        if not isinstance(loss, TokenMean):
            if self.split_weight is not None:
                seed = self._split_weight(micro)
            else:
                seed = micro.size / self._total_samples() * self._loss_scale
            return [(loss, torch.full_like(loss, seed))]
        if self._weigh is not None:
            weights = self._weigh()
        else:
            weights = [1 / self._total_samples()] * len(loss.terms)
        # Where nothing counts a model may return a zero of its own.
        return [
            (total, torch.full_like(total, weight * self._loss_scale))
            for (total, _), weight in zip(loss.terms, weights, strict=True)
            if total.requires_grad
        ]

    def _split_weight(self, micro: MicroBatch) -> float:
        assert self.split_weight is not None
        return self.split_weight(micro.size / self._total_samples(), self._loss_scale)

    def _total_samples(self) -> int:
        if not self._total:
            assert self._count is not None
            self._total = self._count()
        return self._total

    # Buffers that change.

    def _copy_buffers(self, connected: ConnectedStage) -> dict[str, Tensor]:
        return {
            name: connected.stage.module.get_buffer(name).clone() for name in connected.changing
        }

    @contextmanager
    def _buffers_of_first(self) -> Iterator[None]:
        """The first replica's buffers, of stages that do not train: running averages differ by
        replica, and an evaluation is to give what it would after a checkpoint, which has hers."""
        held = [one for one in self.stages.values() if one.changing]
        if self.links.replicas is None or any(one.stage.module.training for one in held):
            yield
            return
        with ExitStack() as stack:
            for connected in held:
                copies = self._copy_buffers(connected)
                self.links.share_first(copies.values())
                stack.enter_context(self._buffers_as(connected, copies))
            yield

    @contextmanager
    def _buffers_as(
        self, connected: ConnectedStage, values: Mapping[str, Tensor]
    ) -> Iterator[None]:
        kept = {name: connected.stage.module.get_buffer(name) for name in values}
        _put_buffers(connected.stage, values)
        try:
            yield
        finally:
            _put_buffers(connected.stage, kept)


def _has_graph(start: Tensor | GradientEdge | None) -> bool:
    return start.requires_grad if isinstance(start, Tensor) else start is not None


def wake_autograd(device: torch.device) -> None:
    """Let autograd's thread take the GPU: torch warns where a product is the first that it does
    there, as in a stage whose backward begins with a linear layer (torch 2.11)."""
    if device.type == "cuda":
        (torch.zeros(1, device=device, requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]  # torch: untyped


def _put_buffers(stage: Stage, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        stage.module.get_submodule(path)._buffers[own] = value

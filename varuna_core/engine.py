"""Runs one rank's list of actions on micro-batches: the only place where a schedule becomes work.

```
F  take an activation, forward, send        f  the same, without a graph
R  forward again, with a graph              B  take a gradient, backward, send
I  as B, weight gradients put off           W  make those
```

The loss is summed on its device and not read. Buffers that a forward changes (batch norm) change
once a micro-batch: a recompute sees them as its forward did and leaves no trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varuna_core.cut import SplitError
from varuna_core.links import Links
from varuna_core.microbatch import MicroBatch
from varuna_core.random_streams import build_seeder
from varuna_core.schedule.actions import Action
from varuna_core.split_values import Crossing
from varuna_core.stage import Stage
from varuna_core.weight_grads import WeightGrads, Work

Trace = Callable[[str, float, float, float], None]
"""Called after an action: its spelling, then when it began, had its message, and ended (seconds
of `time.perf_counter`)."""


@dataclass(kw_only=True)
class Held:
    """What a stage keeps of one micro-batch until its backward."""

    received: Crossing | None
    output: Any = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)


def find_loss(output: Any) -> Tensor:
    """The loss in what the model returns: itself, under "loss", `.loss`, or the first of several.

    It must be one number, the mean over the samples.
    """
    loss = output
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif isinstance(getattr(output, "loss", None), Tensor):
        loss = output.loss
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise SplitError(
            f"the model returns {shown}, not its loss: return one number (the mean over the "
            'samples), a dict with "loss", or a tuple that begins with it'
        )
    return loss.reshape(())


class Engine:
    """One rank's stage at work."""

    def __init__(
        self, stage: Stage, links: Links, *, seed: int, trace: Trace | None = None
    ) -> None:
        self.stage, self.links, self.seed, self.trace = stage, links, seed, trace
        self.weight_grads = WeightGrads()
        self.changing = stage.list_changing()
        self._held: dict[int, Held] = {}
        self._total = 0
        self._count: Callable[[], int] | None = None
        self._ready = 0.0

    def run(
        self,
        actions: Iterable[Action],
        microbatches: Sequence[MicroBatch],
        step: int,
        count: Callable[[], int],
    ) -> Tensor:
        """The sum over the samples of this rank's losses (0 but on the last stage).

        `count` gives the samples of the global batch; it is asked as late as possible.
        """
        self._held.clear()
        self._count, self._total = count, 0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        run = {"F": self._forward, "f": self._forward_only, "R": self._recompute}
        run |= {"B": self._backward, "I": self._backward_inputs, "W": self._backward_weights}
        for action in actions:
            begin = self._ready = time.perf_counter()
            run[action.kind](action.microbatch, microbatches[action.microbatch], step)
            if self.trace is not None:
                self.trace(str(action), begin, self._ready, time.perf_counter())
        self.links.flush()
        return self._loss

    def evaluate(self, microbatches: Sequence[MicroBatch], step: int) -> Tensor:
        """Forwards alone; the sum over the samples of the losses."""
        self._loss = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        with torch.no_grad():
            for micro in microbatches:
                self._pass_on(self._call(micro, self._take_activation(), step), micro)
        self.links.flush()
        return self._loss

    # Forwards.

    def _forward(self, number: int, micro: MicroBatch, step: int) -> None:
        received = self._take_activation()
        output = self._call(micro, received, step)
        self._held[number] = Held(received=received, output=self._pass_on(output, micro))

    def _forward_only(self, number: int, micro: MicroBatch, step: int) -> None:
        held = Held(received=self._take_activation(), buffers=self._copy_buffers())
        with torch.no_grad():
            self._pass_on(self._call(micro, held.received, step), micro)
        self._held[number] = held

    def _recompute(self, number: int, micro: MicroBatch, step: int) -> None:
        held = self._held[number]
        with self._buffers_as(held.buffers):
            output = self._call(micro, held.received, step)
        held.buffers.clear()
        held.output = find_loss(output) if self.stage.is_last else output

    def _call(self, micro: MicroBatch, received: Crossing | None, step: int) -> Any:
        # Code before the stage draws too; its stream is that of the first segment.
        on_segment = build_seeder(self.seed, step, micro.first_sample, self.stage.device)
        on_segment(0)
        return self.stage.forward(micro.inputs, received, on_segment)

    def _take_activation(self) -> Crossing | None:
        channel = self.links.activations_in
        if channel is None:
            return None
        received = channel.take()
        self._ready = time.perf_counter()
        return received

    def _pass_on(self, output: Any, micro: MicroBatch) -> Any:
        """Send what crosses, or add up the loss; what the backward starts from."""
        if self.stage.is_last:
            loss = find_loss(output)
            self._loss += loss.detach().double() * micro.size
            return loss
        assert self.links.activations_out is not None
        self.links.activations_out.send(output.tensors, output.structure)
        return output

    # Backwards.

    def _backward(self, number: int, micro: MicroBatch, step: int) -> None:
        held = self._held.pop(number)
        self._run_backward(held, micro)

    def _backward_inputs(self, number: int, micro: MicroBatch, step: int) -> None:
        held = self._held[number]
        self.weight_grads.putting_off = True
        try:
            self._run_backward(held, micro)
        finally:
            self.weight_grads.putting_off = False
        held.work = self.weight_grads.take()
        held.received = held.output = None

    def _backward_weights(self, number: int, micro: MicroBatch, step: int) -> None:
        for work in self._held.pop(number).work:
            work()

    def _run_backward(self, held: Held, micro: MicroBatch) -> None:
        if self.stage.is_last:
            weight = micro.size / self._total_samples()
            torch.autograd.backward(held.output, torch.full_like(held.output, weight))
        else:
            assert self.links.gradients_in is not None
            gradients = self.links.gradients_in.take().tensors
            self._ready = time.perf_counter()
            pairs = [
                (sent, gradient)
                for sent, gradient in zip(held.output.tensors, gradients, strict=True)
                if gradient is not None and sent.requires_grad
            ]
            if pairs:
                torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])
        if self.links.gradients_out is not None:
            assert held.received is not None
            self.links.gradients_out.send([tensor.grad for tensor in held.received.tensors])

    def _total_samples(self) -> int:
        if not self._total:
            assert self._count is not None
            self._total = self._count()
        return self._total

    # Buffers that change.

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {name: self.stage.module.get_buffer(name).clone() for name in self.changing}

    @contextmanager
    def _buffers_as(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        kept = {name: self.stage.module.get_buffer(name) for name in values}
        self._put_buffers(values)
        try:
            yield
        finally:
            self._put_buffers(kept)

    def _put_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            path, _, own = name.rpartition(".")
            self.stage.module.get_submodule(path)._buffers[own] = value

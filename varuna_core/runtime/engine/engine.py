"""Run a rank's list of schedule actions on micro-batches, in a single loop.

A micro-batch passes each stage of the rank once forward and once backward. The schedule determines
where the backward's graph comes from, and whether the backward is split.

```
                 the graph                                       the backward
plain, recorded  F ───────────────── kept ───────────────────►   B          all gradients
recompute        f ─ ─ ─ inputs and buffers, no graph ─ ─ R ─►      or
offload          F ─► O ─ ─ on the host or a disk ─ ─ L ─────►   I ─ ─ ─ W  weights' later

rank 0       F0 F1          B0 F2 B1    B2    F sends an activation to the next stage,
rank 1          F0 B0 F1 B1       F2 B2       B a gradient to the previous one: this is 1F1B
split           F0 I0 F1 I1 W0    F2 I2 ..    I sends the gradient sooner; W fills idle time
recompute       f0 R0 B0 f1 R1 B1 f2 ..       R sends nothing
```

| action | method | does |
|---|---|---|
| F | `Engine._forward` | take an activation, run the stage, send the output or add up the loss |
| f | `Engine._forward_only` | the same without a graph |
| R | `Engine._recompute` | run the stage again, with a graph |
| O, L | `Pass.offload`, `Pass.load` | copy the graph of an F out of device memory, and back |
| B | `Engine._backward` | take a gradient, run autograd, send the gradient of the activation |
| I | `Engine._backward_inputs` | the same, but only for inputs, not for weights |
| W | `Engine._backward_weights` | compute the postponed weight gradients |

The loop determines the order; a `Pass` (passes.py), one class per source of a graph, executes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna_core.records.logs.trace import ActionTrace
from varuna_core.runtime.comm.devices import wake_autograd
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.engine.adapting import ActionTimes
from varuna_core.runtime.engine.buffers import use_first_buffers
from varuna_core.runtime.engine.gradient_turns import GradientTurns
from varuna_core.runtime.engine.loss_seed import LossSeed
from varuna_core.runtime.engine.mailbox import Mailbox
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.engine.passes import Gradients, Pairs, Pass, Passes, Turn
from varuna_core.runtime.split.random_streams import build_seeder
from varuna_core.runtime.split.stage import Stage
from varuna_core.schedule.actions import FORWARDS, Action

Keep = Callable[[int, Any], None]
"""Function called once for each micro-batch with its number and the model's output."""


class Engine:
    """Runs the actions of one rank's stages."""

    def __init__(
        self,
        stages: Sequence[Stage],
        links: Links,
        passes: Passes,
        loss: LossSeed,
        turns: GradientTurns,
        *,
        seed: int,
        seeds_foreign: bool = False,
        trace: ActionTrace | None = None,
        times: ActionTimes | None = None,
    ) -> None:
        self.links, self.passes, self.loss, self.turns = links, passes, loss, turns
        self.seed, self.trace, self.times = seed, trace, times
        self.seeds_foreign = seeds_foreign
        """True to also seed Python's and numpy's random generators (random_streams.py)."""

        self.stages = {stage.index: stage for stage in stages}
        self.device = stages[0].device
        wake_autograd(self.device)
        self.last = next((stage.module for stage in stages if stage.is_last), None)
        """The module of the last stage if this rank holds that stage, else None."""

        # A trace's clock also says what the device did until then.
        self.mailbox = Mailbox(stages, links, getattr(trace, "now", time.perf_counter))
        self.done_s = 0.0
        """End of a step's last action, by `time.perf_counter`."""

        self._step = 0
        self._keep: Keep | None = None
        self._under_way: dict[tuple[int, int], Pass] = {}
        """Passes that have begun but not ended, keyed by stage and micro-batch."""

        self._forwards = {"F": self._forward, "f": self._forward_only}
        self._others: dict[str, Callable[[Pass], None]] = {
            "R": self._recompute,
            "O": lambda one: one.offload(),
            "L": lambda one: one.load(),
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
        }

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
        """Run a training step. Return the sum over samples of this rank's losses (0 if the rank
        does not hold the last stage), or the summed `totals` of a TokenMean.

        `count` returns the number of samples of the global batch, and `weigh` the weight of each
        sum of a TokenMean; both are called as late as possible. The loss is multiplied by
        `loss_scale` before its backward. Up to `ahead` forwards may run early when a gradient is
        late.
        """
        times = self.times if actions else None
        if times is not None:
            times.begin(len(microbatches))
        self._begin(step, microbatches, keep, times)
        self.loss.begin_step(count, weigh, loss_scale)
        self.passes.begin_step(actions, may_record=keep is None)
        self.turns.begin_step(actions)
        for action in self.mailbox.order(tuple(actions), ahead):
            begin = self.mailbox.ready_s = time.perf_counter()
            self._run_action(action, microbatches[action.microbatch])
            if self.trace is not None:
                self.trace(str(action), begin, self.mailbox.ready_s, time.perf_counter())
            if times is not None:
                times.add(action.kind, action.stage, self.mailbox.ready_s, time.perf_counter())
        self.done_s = time.perf_counter()
        self.links.flush()
        return self.loss.total

    def evaluate(
        self,
        actions: Iterable[Action],
        microbatches: Sequence[MicroBatch],
        step: int,
        keep: Keep | None = None,
    ) -> Tensor:
        """Run only the forwards of the actions, and return the sum over samples of the losses.

        If `keep` is given, the model's output need not contain a loss.
        """
        self._begin(step, microbatches)
        self.loss.begin_step()
        with torch.no_grad(), use_first_buffers(self.passes.buffers.values(), self.links):
            for action in actions:
                if action.kind in FORWARDS:
                    turn = self._open_turn(action, microbatches[action.microbatch])
                    output = turn.run()
                    if turn.stage.is_last and keep is not None:
                        keep(turn.number, output)
                    else:
                        self._deliver(turn, output)
        self.links.flush()
        return self.loss.total

    def _begin(
        self,
        step: int,
        microbatches: Sequence[MicroBatch],
        keep: Keep | None = None,
        times: ActionTimes | None = None,
    ) -> None:
        self._step, self._keep = step, keep
        self._under_way.clear()
        self.mailbox.begin_step(times)
        if not microbatches:
            self.mailbox.exchange_nothing()

    def _run_action(self, action: Action, micro: MicroBatch) -> None:
        key = action.stage, action.microbatch
        if action.kind in FORWARDS:
            self._under_way[key] = self._forwards[action.kind](action, micro)
            return
        one = self._under_way.pop(key) if action.kind in "BW" else self._under_way[key]
        self.turns.begin(action, one.products)
        self._others[action.kind](one)

    def _open_turn(self, action: Action, micro: MicroBatch) -> Turn:
        # Streams are seeded before the wait for an activation: it takes as long as a small message.
        stage, number = self.stages[action.stage], action.microbatch
        seeder = build_seeder(
            self.seed, self._step, micro.first_sample, self.device, self.seeds_foreign
        )
        turn = Turn(stage=stage, number=number, micro=micro, on_segment=seeder)
        turn.start_streams()
        turn.received = self.mailbox.take_activation(stage, number)
        return turn

    def _forward(self, action: Action, micro: MicroBatch) -> Pass:
        one = self.passes.make(action.kind, self._open_turn(action, micro))
        one.output_ready(self._deliver(one.turn, one.forward()))
        return one

    def _forward_only(self, action: Action, micro: MicroBatch) -> Pass:
        with torch.no_grad():
            return self._forward(action, micro)

    def _deliver(self, turn: Turn, output: Any) -> Any:
        """Send the output over the cut, or add up the loss; return the output or the loss."""
        if not turn.stage.is_last:
            self.mailbox.send_activation(turn.stage, turn.number, output)
            return output
        if self._keep is not None:
            self._keep(turn.number, output)
        return self.loss.add(output, turn.micro)

    def _recompute(self, one: Pass) -> None:
        output = one.recompute()
        one.output = self.loss.find(output) if one.turn.stage.is_last else output

    def _backward(self, one: Pass) -> None:
        self._run_backward(one, one.backward)
        self.turns.end()

    def _backward_inputs(self, one: Pass) -> None:
        self._run_backward(one, one.backward_inputs)

    def _run_backward(self, one: Pass, run: Callable[[Pairs, Gradients], Gradients]) -> None:
        turn = one.turn
        gradients: Gradients = ()
        if turn.stage.is_last:
            pairs: Pairs = self.loss.pair(one.output, turn.micro)
        else:
            self.loss.split_weight(turn.micro)
            gradients = self.mailbox.take_gradients(turn.stage, turn.number)
            pairs = one.pair(gradients)
        entered = run(pairs, gradients)
        if not turn.stage.is_first:
            self.mailbox.send_gradients(turn.stage, turn.number, entered)

    def _backward_weights(self, one: Pass) -> None:
        self.loss.split_weight(one.turn.micro)
        one.backward_weights()
        self.turns.end()

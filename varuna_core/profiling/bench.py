"""One segment on one rank: a stage of its own, run by the runtime's engine with made-up neighbours.

    F B  F I W  f R B     one round: joined backward, split backward, recompute

So what is timed is what training runs: stubs before the stage, put-off weight gradients, gradients
added up in fp32. Times are medians of rounds after a warm-up: by CUDA events between actions on a
GPU, by the clock on a CPU. Rounds of a rank's segments take turns, so that a machine that is slow
for a while is so for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from varuna_core.profiling.crossings import Crossings, Inlet, Outlet
from varuna_core.profiling.memory import measure_peak
from varuna_core.records.stage_map import StageMap
from varuna_core.runtime.comm.failure import FailureBoard
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.engine.engine import Engine
from varuna_core.runtime.engine.graph_memory import GraphMeter
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.engine.random_streams import kept_random_state
from varuna_core.runtime.engine.weight_grads import WeightGrads
from varuna_core.runtime.optim.grads import Gradients
from varuna_core.runtime.optim.precision import Masters
from varuna_core.runtime.split.split import RankStages, Split
from varuna_core.schedule.actions import Action, Kind

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding

ROUND: tuple[tuple[Kind, int], ...] = (
    ("F", 0), ("B", 0), ("F", 1), ("I", 1), ("W", 1), ("f", 2), ("R", 2), ("B", 2),
)  # fmt: skip
ONE: tuple[tuple[Kind, int], ...] = (("F", 0), ("B", 0))
WARM_UP, LEAST, MOST = 2, 5, 25
"""Rounds."""
ROUNDS_S = 1.5
"""Rounds go on for about so long, within these bounds."""

BuildOptimizer = Callable[[list[nn.Parameter]], Any]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one segment, micro-batch size and tensor degree."""

    forward_s: float
    backward_s: float
    """Both gradients at once."""
    input_grad_s: float
    weight_grad_s: float
    recompute_s: float
    output_bytes: float
    """What crosses to the next segment."""
    graph_bytes: float
    """What is kept until the backward: what autograd saves and what came in, but not what goes out,
    which is the next segment's, or goes with the stage."""
    work_bytes: float
    """The most that a forward and its backward hold beyond what they keep and send."""


def join_figures(
    given: Sequence[Figures], join: Callable[[Sequence[float]], float] = max
) -> Figures:
    """Of ranks that did the same (the largest), or of equal segments (say, the median)."""
    return Figures(
        **{f.name: join([getattr(one, f.name) for one in given]) for f in fields(Figures)}
    )


class Clock:
    """Takes the time of each action, as the engine's trace."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def start(self) -> None:
        self._marks = []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._mark()

    def __call__(self, action: str, begin: float, ready: float, end: float) -> None:
        self._mark()

    def _mark(self) -> None:
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append(event)

    def read(self) -> list[float]:
        """Seconds of each action since the start."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self.device.type != "cuda":
            return [end - begin for begin, end in pairs]
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


class Bench:
    """A segment ready to be measured."""

    def __init__(
        self,
        split: Split,
        segment: int,
        crossings: Crossings,
        *,
        loss_scale: float,
        seed: int,
        sharding: Sharding | None,
    ) -> None:
        """`split` has a stage for each segment; ranks that share layers call this together."""
        self.segment, self.crossings, self.sharding = segment, crossings, sharding
        self.device = split.device
        on_meta = any(parameter.is_meta for parameter in split.model.parameters())
        stage = split.make_stage(segment, seed=seed if on_meta else None, sharding=sharding)
        stage.train(split.model.training)
        self.stage = stage
        part = RankStages([stage])
        self.masters = Masters(part.parameters(), part.take_full())
        self.incoming, self.outgoing, gradients = Inlet(), Outlet(Inlet()), Outlet(None)
        assert self.outgoing.back is not None
        self.gradients_in = self.outgoing.back
        count = len(split.stages)
        links: Any = Links(
            stage_map=StageMap(ranks=((0,),) * count),
            place=segment,
            replica=0,
            board=FailureBoard(None, ""),
            activations_in={segment - 1: self.incoming},  # type: ignore[dict-item]  # stand-ins
            gradients_out={segment - 1: gradients},  # type: ignore[dict-item]
            activations_out={segment + 1: self.outgoing},  # type: ignore[dict-item]
            gradients_in={segment + 1: self.gradients_in},  # type: ignore[dict-item]
        )
        self.loss_scale = loss_scale
        self.gradients = Gradients(self.masters, {}, links, self.device, factor=1 / loss_scale)
        self.clock = Clock(self.device)
        self.engine = Engine(
            [stage],
            links,
            seed=seed,
            trace=self.clock,
            weight_grads=WeightGrads(self.gradients.note),
        )
        self.engine.weight_grads.install(stage.module)

    def clear(self) -> None:
        """Let go of what a round that failed has left."""
        self.incoming.tensors = self.gradients_in.tensors = ()
        self.outgoing.forget()
        self.engine.run([], [], 0, lambda: 0)
        self.engine.weight_grads.take()
        for master in self.masters.by_name.values():
            master.grad = None

    @property
    def num_parameters(self) -> int:
        """Of this rank's share, each tensor once."""
        return sum(p.numel() for p in {id(p): p for p in self.stage.parameters().values()}.values())

    def measure(self, inputs: Mapping[str, Any], size: int) -> Figures:
        """`inputs` hold `size` samples, on the device."""
        for _ in range(self.begin(inputs, size)):
            self.run_round()
        return self.finish()

    def begin(self, inputs: Mapping[str, Any], size: int) -> int:
        """Warm up; how many rounds there are to be."""
        self.micro = MicroBatch(inputs=inputs, size=size, first_sample=0)
        self.times: dict[str, list[float]] = {}
        self.incoming.tensors = self.crossings.make(self.segment, inputs)
        with kept_random_state(self.device):
            for _ in range(WARM_UP):
                begin = time.perf_counter()
                self._run(ROUND)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                round_s = time.perf_counter() - begin
        return self._choose_rounds(round_s)

    def run_round(self) -> None:
        with kept_random_state(self.device):
            self._run(ROUND)
        for (kind, _), took in zip(ROUND, self.clock.read(), strict=True):
            self.times.setdefault(kind, []).append(took)

    def finish(self) -> Figures:
        with kept_random_state(self.device):
            graph, held, peak = self._measure_memory()
        return Figures(
            forward_s=median(self.times["F"]),
            backward_s=median(self.times["B"]),
            input_grad_s=median(self.times["I"]),
            weight_grad_s=median(self.times["W"]),
            recompute_s=median(self.times["R"]),
            output_bytes=self.outgoing.num_bytes,
            graph_bytes=graph,
            work_bytes=max(0, peak - held),
        )

    def _run(self, actions: Sequence[tuple[Kind, int]]) -> None:
        words = [Action(kind, self.segment, number) for kind, number in actions]
        note = self.gradients.note
        shared = nullcontext() if self.sharding is None else self.sharding.running(note)
        self.clock.start()
        with shared:
            self.engine.run(
                words, [self.micro] * 3, 0, lambda: self.micro.size, loss_scale=self.loss_scale
            )

    def _choose_rounds(self, round_s: float) -> int:
        """The same on ranks that share layers."""
        rounds = torch.tensor(min(MOST, max(LEAST, int(ROUNDS_S / max(round_s, 1e-6)))))
        if self.sharding is not None:
            dist.all_reduce(rounds, op=dist.ReduceOp.MIN, group=self.sharding.group)
        return int(rounds)

    def _measure_memory(self) -> tuple[int, int, int]:
        """What is kept of a micro-batch without what goes out, what is kept with it, the peak."""
        meter = self.engine.meter = GraphMeter(self.micro.size)
        self.incoming.copying = self.gradients_in.copying = True
        try:
            self._run(ONE)
            self.engine.meter = None
            peak = measure_peak(self.device, lambda: self._run(ONE))
        finally:
            self.engine.meter = None
            self.incoming.copying = self.gradients_in.copying = False
        held = int(meter.graphs[self.segment])
        leaving = sum(self.outgoing.storages.values())
        return max(0, held - leaving), held, peak

    def measure_optimizer(self, build: BuildOptimizer) -> float:
        """What a step does once its gradients are there: their norm, the update, weights back."""
        masters = [*{id(m): m for _, m in self.masters.pairs}.values()]
        if not masters:
            return 0.0
        optimizer = build(masters)
        times = []
        for _ in range(WARM_UP + LEAST):
            for master in masters:
                master.grad = torch.zeros_like(master)
            self.clock.start()
            self.gradients.square_norm()
            optimizer.step()
            self.masters.refresh()
            self.clock("", 0, 0, 0)
            times += self.clock.read()
        for master in masters:
            master.grad = None
        return median(times[WARM_UP:])

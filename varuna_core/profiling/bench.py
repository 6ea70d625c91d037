"""Measure one segment on one rank: the engine runs it as a stage with simulated neighbours.

    F B  F I W  f R B     one round: joined backward, split backward, recompute
    f R   F O L           optional: recompute with kept matrix products; offload and load

So the timed code is that of training: stubs before the stage, postponed weight gradients, gradients
accumulated in fp32. Times are medians of rounds after a warm-up, by the wall clock on a CPU. A GPU
runs each round twice: normally, for the time in which the host launches each action (the lower
quartile), and kept occupied until the host has launched all actions, for the GPU's own time, by
CUDA events. In a step the shorter of the two overlaps with the other (planner/model/tables.py). The
host waits for each copy, to measure it:

    host    F B F I W ..                     F B F I W ..
    device   F B F  I W ..                   (occupied)  F B F I W ..

The segments of a rank take turns, so that a temporarily slow machine affects all of them equally.
Memory is counted by torch's allocator on a GPU, and summed from the profiler's memory events on a
CPU.

Input values are made up: random numbers around 0, integers 0 (a valid index), booleans True. Code
whose time depends on values, such as a router of experts, is timed with these values.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from varuna_core.records.rank_map import StageMap
from varuna_core.runtime.comm.failure import FailureBoard
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.comm.values import Crossing, Structure, TensorSpec, sign
from varuna_core.runtime.engine.engine import Engine
from varuna_core.runtime.engine.gradient_turns import GradientTurns
from varuna_core.runtime.engine.graph_memory import GraphMeter
from varuna_core.runtime.engine.loss_seed import LossSeed
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.engine.passes import Passes
from varuna_core.runtime.engine.weight_grads import WeightGrads
from varuna_core.runtime.optim.grads import Gradients
from varuna_core.runtime.optim.precision import Masters, MicroBatchWeight
from varuna_core.runtime.split.random_streams import kept_random_state
from varuna_core.runtime.split.record import Cut
from varuna_core.runtime.split.split import RankStages, Split
from varuna_core.schedule.actions import COPIES, Action, Kind

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding

log = logging.getLogger(__name__)


# Memory.


def measure_peak(device: torch.device, run: Callable[[], None]) -> int:
    """Return the peak of the bytes allocated while `run` runs, above those allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else two lines a run (torch 2.13)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    held = most = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def count_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the values of all tensors, which a message would carry; other objects
    count nothing."""
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, Tensor))


def list_storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each storage by its address."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an allocator's error, such as the host's plain RuntimeError (torch 2.13)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def free_memory(device: torch.device) -> None:
    """Collect garbage, and return cached memory that no tensor uses to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Made-up neighbours.


class Crossings:
    """Generates the tensors that enter each segment, so that each can run on its own."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._shown: Any = None
        self._cuts: list[Cut] = []

    def make(self, segment: int, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors that enter a segment for the batch `inputs`; the tensors are equal on
        all ranks."""
        if not segment:
            return ()
        shown = sign(dict(inputs))
        if shown != self._shown:  # one dry run for all segments
            last = len(self.split.record.cuts) - 1
            record = self.split.rehearsal.run(inputs, last, self.split.model.training)
            self._shown, self._cuts = shown, record.cuts
        draw = torch.Generator().manual_seed(segment)
        specs = self._cuts[segment - 1].specs
        return tuple(make_values(spec, draw, self.split.device) for spec in specs)


def make_values(spec: TensorSpec, draw: torch.Generator, device: torch.device) -> Tensor:
    """Return made-up values, equal on all ranks: random around 0, integers 0 or booleans True."""
    if spec.dtype.is_floating_point:
        made = torch.randn(spec.shape, generator=draw)
    else:
        made = torch.full(spec.shape, spec.dtype == torch.bool)
    return made.to(device, spec.dtype)


class Inlet:
    """Stand-in for a Receiver that delivers the same message each time."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor | None, ...] = ()
        self.batch = ""
        """Description of the sender's batch shapes, always empty, since there is no sender."""
        self.copying = False
        """True to copy each message to memory of its own, as a channel does."""

    def take(self) -> Crossing:
        made = (
            None if t is None else t.clone() if self.copying else t.detach() for t in self.tensors
        )
        return Crossing(cast("tuple[Tensor, ...]", tuple(made)), None)

    def is_there(self) -> bool:
        return True


class Outlet:
    """Stand-in for a Sender that records message sizes, and returns gradients of their shapes."""

    def __init__(self, back: Inlet | None) -> None:
        self.back = back
        self.num_bytes = 0
        self.storages: dict[int, int] = {}
        self._shapes: list[Any] = []

    def send(self, tensors: Sequence[Tensor | None], structure: Structure | None = None) -> None:
        if not tensors:  # the message of a step without a batch, with which the bench lets go
            return
        self.num_bytes = count_bytes(tensors)
        self.storages = list_storages(tensors)
        shapes = [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in tensors]
        if self.back is None or shapes == self._shapes or not torch.is_grad_enabled():
            return
        self._shapes = shapes
        self.back.tensors = tuple(
            torch.randn_like(t.detach()) if t is not None and t.requires_grad else None
            for t in tensors
        )

    def forget(self) -> None:
        self._shapes, self.storages = [], {}

    def flush(self) -> None:
        pass


# The bench.

ROUND: tuple[tuple[Kind, int], ...] = (
    ("F", 0), ("B", 0), ("F", 1), ("I", 1), ("W", 1), ("f", 2), ("R", 2), ("B", 2),
)  # fmt: skip
ONE: tuple[tuple[Kind, int], ...] = (("F", 0), ("B", 0))
BETWEEN: tuple[tuple[Kind, int], ...] = (("f", 0), ("R", 0))
"""Actions that are timed while the forward keeps its matrix products."""
COPIED: tuple[tuple[Kind, int], ...] = (("F", 0), ("O", 0), ("L", 0))
MOST_COPIED = 2**30
"""Bytes of a graph above which a copy's time is extrapolated from the size before. All ranks of a
node copy at once, and a host keeps the memory that it has pinned."""
WARM_UP, LEAST, MOST = 2, 5, 25
"""Numbers of rounds: for the warm-up, the least, and the most."""
ROUNDS_S = 1.5
"""Seconds for which rounds are repeated, as long as their number stays between LEAST and MOST."""
BuildOptimizer = Callable[[list[nn.Parameter]], Any]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measurements of one segment at one micro-batch size and tensor degree."""

    forward_s: float
    backward_s: float
    """Seconds for both gradients at once."""
    input_grad_s: float
    weight_grad_s: float
    recompute_s: float
    forward_host_s: float = 0.0
    """Seconds of the host; 0 if the host itself does the device's work."""
    backward_host_s: float = 0.0
    input_grad_host_s: float = 0.0
    weight_grad_host_s: float = 0.0
    recompute_host_s: float = 0.0
    output_bytes: float
    """Bytes sent to the next segment."""
    graph_bytes: float
    """Bytes kept until the backward: saved by autograd and received, but not the output, which
    belongs to the next segment or leaves with the stage."""
    work_bytes: float
    """The most bytes that a forward and its backward hold beyond what they keep and send."""
    selective_s: float | None = None
    """Seconds of a recompute with kept products, plus what keeping adds to the forward. None, here
    and in the fields below: not measured."""
    selective_host_s: float | None = None
    kept_bytes: float | None = None
    """Bytes that a forward keeps for a recompute with kept products, besides the input."""
    offload_s: float | None = None
    load_s: float | None = None


def join_figures(
    given: Sequence[Figures], join: Callable[[Sequence[float]], float] = max
) -> Figures:
    """Join the figures of several ranks (`join` is then the maximum) or of equal segments (such as
    the median)."""
    columns = {f.name: [getattr(one, f.name) for one in given] for f in fields(Figures)}
    joined: dict[str, Any] = {
        name: None if None in column else join(column) for name, column in columns.items()
    }
    return Figures(**joined)


class Queue(Protocol):
    """Interface of a device that runs asynchronously what the host has launched."""

    def synchronize(self) -> None: ...

    def occupy(self, seconds: float) -> None:
        """Give the device work for at least this many seconds."""

    def mark(self) -> Any:
        """Return an event that occurs once everything launched so far is done."""


OCCUPIED = 2.0
"""A device is kept occupied for this many times the launches' duration, with some margin."""
MOST_CYCLES_PER_S = 2.5e9
"""A clock rate that no GPU exceeds."""


class CudaQueue:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def occupy(self, seconds: float) -> None:
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(seconds * MOST_CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class Clock:
    """Times each action on the host and, if separate, on the device; used as the engine's trace."""

    def __init__(self, queue: Queue | None) -> None:
        self.queue = queue
        self._host: list[float] = []
        self._events: list[Any] = []

    def start(self, occupied_s: float = 0.0) -> None:
        """Start timing with an idle device, or one kept occupied for `occupied_s`."""
        self._host, self._events = [], []
        if self.queue is not None:
            self.queue.synchronize()
            if occupied_s:
                self.queue.occupy(occupied_s)
        self._mark()

    def __call__(self, action: str, begin: float, ready: float, end: float) -> None:
        if self.queue is not None and any(kind in action for kind in COPIES):
            self.queue.synchronize()  # else what comes behind it would wait
        self._mark()

    def _mark(self) -> None:
        if self.queue is not None:
            self._events.append(self.queue.mark())
        self._host.append(time.perf_counter())

    def read_host(self) -> list[float]:
        """Return the host's seconds for each action since the start."""
        return [end - begin for begin, end in itertools.pairwise(self._host)]

    def read(self) -> list[float]:
        """Return the device's seconds for each action since the start."""
        if self.queue is None:
            return self.read_host()
        self.queue.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(self._events)]


class Bench:
    """One segment of the model, built as a stage and ready to be measured."""

    def __init__(
        self,
        split: Split,
        segment: int,
        crossings: Crossings,
        *,
        loss_scale: float,
        seed: int,
        sharding: Sharding | None,
        selective: bool = True,
    ) -> None:
        """`split` has a stage for each segment; ranks that share layers call this together.

        With `selective`, `recompute: selective` is measured too.
        """
        self.segment, self.crossings, self.sharding = segment, crossings, sharding
        self.selective, self.keeping = selective, {segment}
        self.can_copy = self.is_copied = True
        self.last_copies: tuple[int, float, float, float] | None = None
        """For the last size that was copied: the size, bytes of a graph, seconds out and back."""
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
        weight = MicroBatchWeight(factor=1 / loss_scale)
        self.gradients = Gradients(self.masters, {}, links, self.device, weight=weight)
        self.clock = Clock(CudaQueue(self.device) if self.device.type == "cuda" else None)
        weight_grads = WeightGrads(self.gradients.note, self.gradients.find_wide)
        weight_grads.install(stage.module)
        self.engine = Engine(
            [stage],
            links,
            Passes([stage], weight_grads),
            LossSeed(split.record.loss, self.device),
            GradientTurns([stage], weight_grads),
            seed=seed,
            trace=self.clock,
        )

    def clear(self) -> None:
        """Drop the state that a failed round has left."""
        self.incoming.tensors = self.gradients_in.tensors = ()
        self.outgoing.forget()
        self.engine.run([], [], 0, lambda: 0)
        for master in self.masters.by_name.values():
            master.grad = None

    @property
    def num_parameters(self) -> int:
        """Number of elements in this rank's share, counting each tensor once."""
        return sum(p.numel() for p in {id(p): p for p in self.stage.parameters().values()}.values())

    def measure(self, inputs: Mapping[str, Any], size: int) -> Figures:
        """Return the figures for a batch `inputs` of `size` samples on the device."""
        for _ in range(self.begin(inputs, size)):
            self.run_round()
        return self.finish()

    def begin(self, inputs: Mapping[str, Any], size: int) -> int:
        """Warm up with this batch, and return the number of rounds to run."""
        self.micro = MicroBatch(inputs=inputs, size=size, first_sample=0)
        if self.last_copies is not None:
            before, num_bytes, _, _ = self.last_copies
            self.is_copied = num_bytes * size / before <= MOST_COPIED
        self.incoming.tensors = self.crossings.make(self.segment, inputs)
        with kept_random_state(self.device):
            for _ in range(WARM_UP):
                begin = time.perf_counter()
                self._run(ROUND)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                round_s = time.perf_counter() - begin
                self._forget_rounds()
                self._run_others()
        self._forget_rounds()
        return self._choose_rounds(round_s)

    def _forget_rounds(self) -> None:
        self.rounds: list[list[float]] = []
        """For each round, the seconds of ROUND's actions."""
        self.host_rounds: list[list[float]] = []
        """For each round, the seconds of ROUND's actions by the host's clock; empty if the host
        does the device's work itself."""
        self.between: list[list[float]] = []
        """Seconds of BETWEEN's actions in the first rounds."""
        self.host_between: list[list[float]] = []
        self.copied: list[list[float]] = []
        """Seconds of COPIED's actions in the first rounds."""

    def run_round(self) -> None:
        with kept_random_state(self.device):
            self._time(ROUND, self.rounds, self.host_rounds)
            if len(self.rounds) <= LEAST:
                self._run_others()

    def _time(
        self,
        actions: Sequence[tuple[Kind, int]],
        rounds: list[list[float]],
        host_rounds: list[list[float]],
    ) -> None:
        self._run(actions)
        if self.clock.queue is not None:
            launched = self.clock.read_host()
            host_rounds.append(launched)
            self._run(actions, occupied_s=OCCUPIED * sum(launched))
        rounds.append(self.clock.read())

    def _run_others(self) -> None:
        """Run the optional measurements (kept products, offload); log those that fail."""
        if self.selective:
            try:
                with self._keeping_products():
                    self._time(BETWEEN, self.between, self.host_between)
            except Exception as error:  # of any model's code, which sees its operations watched
                if is_out_of_memory(error):
                    raise
                self.selective = False
                self._warn("selective", error)
        try:
            self._run(COPIED if self.is_copied else COPIED[:1])
            if self.is_copied:
                self.copied.append(self.clock.read())
        except Exception as error:  # no room for the graph, or hooks that do not go with the model
            if self.can_copy:
                self._warn("offload", error)
            self.can_copy = False  # the next one is tried all the same: others share the forward
        self._let_go()

    def _warn(self, recompute: str, error: Exception) -> None:
        log.warning("segment %d: recompute %s is not measured: %s", self.segment, recompute, error)

    def _let_go(self) -> None:
        """Release the graphs of forwards that had no backward."""
        self.engine.run([], [], 0, lambda: 0)

    @contextmanager
    def _keeping_products(self) -> Iterator[None]:
        """Make the engine save matrix products for the recompute, if the segment gains by this."""
        self.engine.passes.selective = self.keeping
        try:
            yield
        finally:
            self.engine.passes.selective = set()

    def finish(self) -> Figures:
        with kept_random_state(self.device):
            graph, held, peak = self._measure_memory()
            others = self._find_others(held)
        return Figures(
            forward_s=_compute_usual(self.rounds, "F"),
            backward_s=_compute_usual(self.rounds, "B"),
            input_grad_s=_compute_usual(self.rounds, "I"),
            weight_grad_s=_compute_usual(self.rounds, "W"),
            recompute_s=_compute_usual(self.rounds, "R"),
            forward_host_s=_compute_undisturbed(self.host_rounds, "F"),
            backward_host_s=_compute_undisturbed(self.host_rounds, "B"),
            input_grad_host_s=_compute_undisturbed(self.host_rounds, "I"),
            weight_grad_host_s=_compute_undisturbed(self.host_rounds, "W"),
            recompute_host_s=_compute_undisturbed(self.host_rounds, "R"),
            output_bytes=self.outgoing.num_bytes,
            graph_bytes=graph,
            work_bytes=max(0, peak - held),
            **others,
        )

    def _find_others(self, held: float) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.can_copy:
            found["offload_s"], found["load_s"] = self._find_copies(held)
        if self.selective:
            for name, find, rounds, between in (
                ("selective_s", _compute_usual, self.rounds, self.between),
                ("selective_host_s", _compute_undisturbed, self.host_rounds, self.host_between),
            ):
                more = find(between, "f", BETWEEN) - find(rounds, "F")
                found[name] = max(0.0, find(between, "R", BETWEEN) + more)
            found["kept_bytes"] = self._measure_kept()
        return found

    def _find_copies(self, held: float) -> tuple[float, float]:
        if self.is_copied:
            out, back = (_compute_usual(self.copied, kind, COPIED) for kind in COPIES)
            self.last_copies = self.micro.size, held, out, back
        assert self.last_copies is not None
        size, num_bytes, out, back = self.last_copies
        more = held / num_bytes if num_bytes else self.micro.size / size
        return out * more, back * more

    def _measure_kept(self) -> float:
        meter = self.engine.passes.meter = GraphMeter(self.micro.size)
        try:
            with self._keeping_products():
                self._run(BETWEEN)
        finally:
            self.engine.passes.meter = None
        self._let_go()
        return meter.kept.get(self.segment, 0.0)

    def _run(self, actions: Sequence[tuple[Kind, int]], occupied_s: float = 0.0) -> None:
        words = [Action(kind, self.segment, number) for kind, number in actions]
        note = self.gradients.note
        shared = nullcontext() if self.sharding is None else self.sharding.running(note)
        self.clock.start(occupied_s)
        with shared:
            self.engine.run(
                words, [self.micro] * 3, 0, lambda: self.micro.size, loss_scale=self.loss_scale
            )

    def _choose_rounds(self, round_s: float) -> int:
        """Choose how often to repeat a measurement whose round takes `round_s`; ranks that share
        layers agree on the number, since they communicate in each round."""
        rounds = torch.tensor(min(MOST, max(LEAST, int(ROUNDS_S / max(round_s, 1e-6)))))
        if self.sharding is not None:
            dist.all_reduce(rounds, op=dist.ReduceOp.MIN, group=self.sharding.group)
        return int(rounds)

    def _measure_memory(self) -> tuple[int, int, int]:
        """Return the bytes of a micro-batch's graph without and with its output, and peak bytes."""
        meter = self.engine.passes.meter = GraphMeter(self.micro.size)
        self.incoming.copying = self.gradients_in.copying = True
        try:
            self._run(ONE)
            self.engine.passes.meter = None
            peak = measure_peak(self.device, lambda: self._run(ONE))
        finally:
            self.engine.passes.meter = None
            self.incoming.copying = self.gradients_in.copying = False
        held = int(meter.graphs[self.segment])
        leaving = sum(self.outgoing.storages.values())
        return max(0, held - leaving), held, peak

    def measure_optimizer(self, build: BuildOptimizer) -> float:
        """Return the seconds of an optimizer step: gradient norm, update, weights refreshed."""
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


def _compute_usual(
    rounds: Sequence[Sequence[float]], kind: Kind, of: Sequence[tuple[Kind, int]] = ROUND
) -> float:
    """Return the median time of a kind of action; 0 without rounds."""
    return median([*itertools.chain(*_list_times(rounds, kind, of))] or [0.0])


def _compute_undisturbed(
    rounds: Sequence[Sequence[float]], kind: Kind, of: Sequence[tuple[Kind, int]] = ROUND
) -> float:
    """Return the host's undisturbed time for an action: the lower quartile over rounds. Other
    programs only add to launches, and in a step a busy device hides such delays."""
    each = [sorted(times) for times in _list_times(rounds, kind, of)]
    return mean(times[len(times) // 4] for times in each) if rounds else 0.0


def _list_times(
    rounds: Sequence[Sequence[float]], kind: Kind, of: Sequence[tuple[Kind, int]]
) -> list[list[float]]:
    """Return the times of all actions of `kind`: a list for each of its positions in `of`, with one
    time for each round."""
    places = [place for place, (own, _) in enumerate(of) if own == kind]
    return [[took[place] for took in rounds] for place in places]

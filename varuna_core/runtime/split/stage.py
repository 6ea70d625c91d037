"""Module of one stage: runs the user's forward from the stage's first cut to its last cut.

    before the stage        the stage                  after it
    stubs, plain code  cut  live, with gradients  cut  never runs
                        ^ received tensors enter   ^ StageEnd leaves

Code before a stage must run, at low cost, and its results must not matter. The largest modules that
own parameters and return before the stage starts are not run: stubs return buffers with the shapes
of their results. All stubs share one buffer per dtype. For a module called both before and in the
stage, only the earlier calls are stubbed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from varuna_core.runtime.comm.values import (
    Crossing,
    TensorSpec,
    as_crossing,
    is_inexact,
    map_leaves,
    sign,
    structure_of,
    take_apart,
)
from varuna_core.runtime.split.cut import (
    CROSSED,
    CutPoint,
    SplitError,
    StageEnd,
    find_crossed,
    unpack,
    watch,
)
from varuna_core.runtime.split.inputs import FreshInputs
from varuna_core.runtime.split.record import Record
from varuna_core.runtime.split.rehearsal import Rehearsal

# Stubs.

Make = Callable[[TensorSpec], Tensor]


@dataclass(frozen=True, kw_only=True)
class StubCall:
    """The result of one stubbed call, and the number of cuts that it would have passed."""

    output: Any
    cuts: int


StubPlan = dict[str, list["StubCall | None"]]
"""For each stubbed module, its calls in order; None for a call that really runs."""


def plan_stubs(record: Record, first: int, names: Collection[str]) -> tuple[StubPlan, set[int]]:
    """Return stubs for calls of the modules `names` before segment `first`, and the numbers of the
    recorded calls that the stubs replace."""
    plan: StubPlan = {}
    stubbed: set[int] = set()
    for number, call in enumerate(record.calls):
        if record.is_within(call.parent, stubbed):
            continue
        made = None
        if call.module in names and not call.opaque and 0 <= call.end < first:
            stubbed.add(number)
            made = StubCall(output=call.output, cuts=call.end - call.begin)
        plan.setdefault(call.module, []).append(made)
    return {name: calls for name, calls in plan.items() if any(calls)}, stubbed


class Pool:
    """Flat buffers, one per dtype; the results of all stubs are views of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flats: dict[torch.dtype, Tensor] = {}
        self.versions: dict[torch.dtype, int] = {}

    def make(self, spec: TensorSpec) -> Tensor:
        size = 1 + sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
        flat = self.flats.get(spec.dtype)
        if flat is None or flat.numel() < size:
            flat = torch.zeros(max(size, 1), dtype=spec.dtype, device=self.device)
            self.flats[spec.dtype], self.versions[spec.dtype] = flat, flat._version
        return flat.as_strided(spec.shape, spec.stride)

    def clean(self) -> None:
        """Zero the memory that code before the stage has written, so that values do not grow from
        step to step."""
        for dtype, flat in self.flats.items():
            if flat._version != self.versions[dtype]:
                flat.zero_()
                self.versions[dtype] = flat._version


class Switch:
    """Flag that is on while code before the stage runs, so that stubs replace modules."""

    def __init__(self) -> None:
        self.on = False


class Stub:
    """Replacement for a module's forward while a stage runs."""

    def __init__(
        self, real: Callable[..., Any], switch: Switch, advance: Callable[[int], None]
    ) -> None:
        self.real, self.switch, self.advance = real, switch, advance
        self.calls: list[StubCall | None] = []
        self.is_simple, self.output, self.position = False, None, 0

    def load(self, calls: list[StubCall | None], make: Make) -> None:
        self.use(
            [call and StubCall(output=fill(call.output, make), cuts=call.cuts) for call in calls]
        )

    def use(self, calls: list[StubCall | None]) -> None:
        self.calls = calls
        only = calls[0] if len(calls) == 1 else None
        self.is_simple = only is not None and not only.cuts
        self.output = only.output if only is not None else None

    def stands_in(self, advanced: int = 0) -> bool:
        """Return True if the stub replaces the next call (the previous one if `advanced` is 1)."""
        place = max(self.position - advanced, 0)
        return (
            self.switch.on
            and bool(self.calls)
            and (self.calls[min(place, len(self.calls) - 1)] is not None)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_simple and self.switch.on:
            return self.output
        if not self.switch.on or not self.calls:
            return self.real(*args, **kwargs)
        # A call beyond the dry run's (code that looks at values) gets the last one's output.
        call = self.calls[min(self.position, len(self.calls) - 1)]
        self.position += 1
        if call is None:
            return self.real(*args, **kwargs)
        if call.cuts:
            self.advance(call.cuts)
        return call.output


def rest_hooks(module: nn.Module, stub: Stub, cutting: Collection[int]) -> None:
    """Disable the module's hooks while a stub replaces the module, except hooks that pass a cut,
    since cuts are counted."""

    def rest(hook: Callable[..., Any], advanced: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return None if stub.stands_in(advanced) else hook(*args, **kwargs)

        return run

    for number, hook in module._forward_pre_hooks.items():
        if number not in cutting:
            module._forward_pre_hooks[number] = rest(hook, 0)
    for number, hook in module._forward_hooks.items():
        module._forward_hooks[number] = rest(hook, 1)


def fill(output: Any, make: Make) -> Any:
    return map_leaves(lambda leaf: make(leaf) if isinstance(leaf, TensorSpec) else leaf, output)


# The stage.

# Shapes of batches whose stubs are kept; a dry run of what lies before the stage makes new ones.
NUM_KEPT_SHAPES = 64


@dataclass(kw_only=True)
class StubOutputs:
    """The stubs' results for one batch shape."""

    plan: StubPlan
    calls: dict[str, list[Any]] = field(default_factory=dict)


class Draws(Protocol):
    """Records the random draws of each segment in each forward."""

    def foresee(self, stage: Stage, inputs: Mapping[str, Any]) -> Any: ...

    def follow(
        self, stage: Stage, inputs: Mapping[str, Any], on_segment: Callable[[int], None]
    ) -> Callable[[int], None]: ...

    def leave(self) -> None: ...


class Stage:
    """A part of a model, with its own parameters under the plain model's names."""

    def __init__(
        self,
        *,
        index: int,
        segments: range,
        module: nn.Module,
        record: Record,
        rehearsal: Rehearsal,
        device: torch.device,
        parameters: dict[str, nn.Parameter],
        buffers: Sequence[str],
        early: Mapping[str, nn.Parameter],
        full: dict[str, Tensor],
    ) -> None:
        self.index, self.segments, self.device = index, segments, device
        self.module, self.record, self.rehearsal = module, record, rehearsal
        self.early = dict(early)
        """Parameters that code before the stage reads: stand-ins, or the stage's own parameters."""

        traces = record.list_input_traces()
        fresh = FreshInputs(traces)
        self._fresh = fresh if fresh.is_needed else None
        self.copied: set[int] = {
            place for trace in traces for place in trace.list_written(segments.start - 1, segments)
        }
        """Received tensors that the model changes in place, and which are copied on entry."""

        self.full = full
        """fp32 values of trained parameters that are cast to half precision."""

        self.at_start: Callable[[], None] | None = None
        self.at_cut: Callable[[Any], Any] | None = None
        """Converts the values at the stage's last cut, for sharded layers."""

        self.draws: Draws | None = None
        """Random draws of sharded layers."""

        self.at_return: Callable[[Any], Any] | None = None
        """Converts the model's return value, for sharded layers."""

        self.stubs: dict[str, Stub] = {}
        self._parameters, self._buffers = parameters, tuple(buffers)
        self._entering = [*parameters.values()]
        """The parameters, including those given up later."""

        num_cuts = len(record.cuts)
        self.is_first, self.is_last = segments.start == 0, segments.stop == num_cuts + 1
        self._start, self._end = segments.start - 1, segments.stop - 1
        self._passed = 0
        self._sent: Crossing | None = None
        self._received: Crossing | Sequence[Tensor] | None = None
        self._came_learning = False
        """True if any received tensor requires grad."""

        self._on_segment: Callable[[int], None] | None = None
        self._pool, self.switch = Pool(device), Switch()
        self._loaded: OrderedDict[Any, StubOutputs] = OrderedDict()
        self._current: Any = None

    # What it owns.

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters by the plain model's names, including all names of tied ones."""
        return dict(self._parameters)

    def give_up(self, names: Iterable[str]) -> None:
        """Drop parameters that another object manages from now on."""
        for name in names:
            del self._parameters[name]

    def buffers(self) -> dict[str, Tensor]:
        """Return the current buffers that this stage saves."""
        return {name: self.module.get_buffer(name) for name in self._buffers}

    def list_changing(self) -> list[str]:
        """Return the names of buffers that the stage's forward changes."""
        return [
            name
            for name, _ in self.module.named_buffers()
            if not self.record.changes.get(name, set()).isdisjoint(self.segments)
        ]

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    # One micro-batch.

    def forward(
        self,
        inputs: Mapping[str, Any],
        received: Crossing | Sequence[Tensor] | None = None,
        on_segment: Callable[[int], None] | None = None,
    ) -> Any:
        """Run the stage: return a Crossing for the next stage or, on the last stage, the model's
        output.

        `received` holds the previous stage's detached tensors; `requires_grad` is set here on those
        that need a gradient. `on_segment(k)` is called at the start of each segment of the stage.
        """
        if self.segments.start > 0 and received is None:
            raise SplitError(f"stage {self.index} needs input from {self.name_cut(self._start)}")
        if not self.segments:
            assert received is not None
            return self._hand_on(received)
        self._passed, self._sent, self._received = 0, None, received
        if self.draws is not None and on_segment is not None:
            on_segment = self.draws.follow(self, inputs, on_segment)
        self._on_segment = on_segment
        if self._fresh is not None:
            inputs = self._fresh.make(inputs)
        if not self.is_first:
            self._prepare(inputs)
        before = watch(self)
        try:
            if self.is_first and on_segment is not None:
                on_segment(0)
            out = self.module(**inputs)
        except StageEnd:
            out = None
        finally:
            watch(before)
            self._received = None
            self.switch.on = False
            if self.draws is not None:
                self.draws.leave()
        return self._finish(out)

    def _finish(self, out: Any) -> Any:
        sent, self._sent = self._sent, None
        if sent is not None:
            return sent
        if self._passed != len(self.record.cuts):
            raise SplitError(
                f"the model returned after {self._passed} CutPoints, but it passed "
                f"{len(self.record.cuts)} in the dry run: the number must not depend on the data"
            )
        if CROSSED:
            out = map_leaves(find_crossed, out)
        return out if self.at_return is None else self.at_return(out)

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        number = self._passed
        self._passed = number + 1
        if number < self._start:
            return values[0] if len(values) == 1 else values
        if number >= self._end:
            if number == self._end:
                sent = take_apart(values if self.at_cut is None else self.at_cut(values))
                assert sent.structure is not None
                structure = sent.structure.with_learning(self._find_learning(sent.tensors))
                self._sent = Crossing(sent.tensors, structure)
            raise StageEnd  # again, where a bare `except:` of the user's caught the first one
        if number == self._start:
            values = self._receive(values)
        if self._on_segment is not None:
            self._on_segment(number + 1)
        return unpack(values)

    def _receive(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the received tensors in the structure that was sent, or in this forward's own."""
        if self.at_start is not None:
            self.at_start()
        self.switch.on = False
        received = self._received
        assert received is not None
        tensors, sent = as_crossing(received)
        structure = sent or structure_of(values)
        if len(tensors) != len(structure.places):
            raise SplitError(
                f"{len(tensors)} tensors were received through {self.name_cut(self._start)}, but "
                f"the model passes {len(structure.places)} there"
            )
        self._mark(tensors, structure.learning)
        entering = [t.clone() if i in self.copied else t for i, t in enumerate(tensors)]
        return structure.join(entering)

    def refuse_change(self) -> NoReturn:
        raise RuntimeError(
            f"a tensor that crosses {self.name_cut(self._start)} was changed in place in this "
            "step but not in the dry run, which determines what is copied: give dummy_inputs "
            "with which the model changes it too, or change a copy (x = x.clone())"
        )

    def refuse_learning(self) -> NoReturn:
        raise RuntimeError(
            f"a tensor that crosses {self.name_cut(self._end)} requires grad in this micro-batch "
            "but not in the dry run, which determines this for forwards that are computed twice: "
            "give dummy_inputs with which it requires grad, or set recompute='none'"
        )

    def _mark(self, tensors: Sequence[Tensor], learning: Sequence[bool] | None) -> None:
        """Set `requires_grad` on tensors that require grad in the plain model."""
        if learning is None:
            learning = self._foresee_learning(self._start, tensors)
        self._came_learning = any(learning)
        if not torch.is_grad_enabled():
            return
        for wanted, tensor in zip(learning, tensors, strict=True):
            if wanted and not tensor.requires_grad:
                tensor.requires_grad_()

    def _find_learning(self, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
        """Return which outgoing tensors require grad, which may depend on a branch. A forward
        without gradients uses the dry run's answer; if no tensor required grad in the dry run,
        but received tensors or parameters do now, all floating-point tensors count as requiring
        grad."""
        if torch.is_grad_enabled():
            return tuple(tensor.requires_grad for tensor in tensors)
        foreseen = self._foresee_learning(self._end, tensors)
        if any(foreseen) or not (
            self._came_learning or any(p.requires_grad for p in self._entering)
        ):
            return foreseen
        return tuple(is_inexact(tensor.dtype) for tensor in tensors)

    def _foresee_learning(self, cut: int, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
        specs = self.record.cuts[cut].specs
        if len(specs) == len(tensors):
            return tuple(spec.requires_grad for spec in specs)
        return tuple(is_inexact(tensor.dtype) for tensor in tensors)

    def _hand_on(self, received: Crossing | Sequence[Tensor]) -> Crossing:
        """Pass values through a stage that has no segments."""
        crossing = as_crossing(received)
        structure = crossing.structure
        self._mark(crossing.tensors, None if structure is None else structure.learning)
        return crossing

    def name_cut(self, number: int) -> str:
        return f"cut {number} ({self.record.cuts[number].name})"

    # Stubs.

    def install(self, plan: StubPlan, inputs: Mapping[str, Any]) -> None:
        """Replace the modules that the dry run found before the stage with stubs."""
        self._loaded[self.key_of(inputs)] = StubOutputs(plan=plan)
        for name in plan:
            module = self.module.get_submodule(name)
            self.stubs[name] = stub = Stub(module.forward, self.switch, self._advance)
            module.forward = stub
            rest_hooks(module, stub, {n for path, n in self.record.cutting_hooks if path == name})

    def refuse_calls(self, names: Sequence[str]) -> None:
        """Raise an error if these modules are called in the stage, which lacks their weights or
        does not save their buffers."""
        for name in names:
            self.module.get_submodule(name).register_forward_pre_hook(partial(self.refuse, name))

    def refuse(self, name: str, module: nn.Module, args: Any) -> None:
        if not self.switch.on and (self.is_first or self._received is not None):
            raise SplitError(
                f"module {name!r} is called in stage {self.index}, which does not hold it, as the "
                "dry run did not call it: use dummy inputs with which the model calls every "
                "module"
            )

    @contextmanager
    def loaded(self, inputs: Mapping[str, Any], make_for: Callable[[str], Make]) -> Iterator[None]:
        """Let each stub return the results of the function that `make_for` gives for its name.

        This is a context manager, with which the check of the split runs a stage alone.
        """
        plan = self.plan_for(inputs) if self.stubs else {}
        for name, stub in self.stubs.items():
            stub.load(plan.get(name, []), make_for(name))
        self._current = self.key_of(inputs)
        try:
            yield
        finally:
            self._current = None

    @property
    def is_live(self) -> bool:
        """Return True once the running forward has passed the stage's first cut."""
        return self._received is not None and not self.switch.on

    def key_of(self, inputs: Mapping[str, Any]) -> Any:
        """Return a key for the batch shape; batches with equal keys share their stubs' results."""
        return self.module.training, sign(inputs)

    def foresee(self, inputs: Mapping[str, Any]) -> None:
        """Make the dry runs that a new batch shape needs, while no forward is being watched."""
        if self.stubs:
            self.plan_for(inputs)
        if self.draws is not None:
            self.draws.foresee(self, inputs)

    def plan_for(self, inputs: Mapping[str, Any]) -> StubPlan:
        """Return the stubs for batches of this shape."""
        return self._find(self.key_of(inputs), inputs).plan

    def _find(self, key: Any, inputs: Mapping[str, Any]) -> StubOutputs:
        if key not in self._loaded:
            record = self.rehearsal.run(inputs, self._start, self.module.training)
            plan, _ = plan_stubs(record, self.segments.start, self.stubs)
            self._loaded[key] = StubOutputs(plan=plan)
            if len(self._loaded) > NUM_KEPT_SHAPES:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        return self._loaded[key]

    def _advance(self, cuts: int) -> None:
        self._passed += cuts

    def list_stub_outputs(self) -> list[Any]:
        """Return the stubs' results for the last batch."""
        calls = [call for stub in self.stubs.values() for call in stub.calls]
        return [call.output for call in calls if call is not None]

    def _prepare(self, inputs: Mapping[str, Any]) -> None:
        self.switch.on = True
        if not self.stubs:
            return
        key = self.key_of(inputs)
        if key != self._current:
            self._change_shape(key, inputs)
        self._pool.clean()
        for stub in self.stubs.values():
            stub.position = 0

    def _change_shape(self, key: Any, inputs: Mapping[str, Any]) -> None:
        """Prepare stubs for another batch shape."""
        loaded = self._find(key, inputs)
        for name, stub in self.stubs.items():
            if name not in loaded.calls:
                stub.load(loaded.plan.get(name, []), self._pool.make)
                loaded.calls[name] = stub.calls
            stub.use(loaded.calls[name])
        self._current = key

"""Replay: before training, refuse a stage that would compute something else than the whole model.

Modules before a stage are stubs, which only provide results. Their side effects (a hook that
collects outputs, items added to a list) are missing in the stage, and the poison check does not
detect this: for example, a loss over the routers of all layers would cover only the stage's own. So
the dry run is repeated, once as a whole and once with the stage's stubs; both must call the same
functions between the stage's cuts, with results of the same shapes.

    whole      f f f | cut | f f f | cut |
    replayed   stubs | cut | f f f | cut |      starts from the whole run's values at the cut
                             compared
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from varuna_core.runtime.comm.values import TensorSpec, map_leaves, tensors_of
from varuna_core.runtime.split.attributes import kept_attributes
from varuna_core.runtime.split.cut import CutPoint, SplitError, StageEnd, unpack, watch
from varuna_core.runtime.split.random_streams import CPU, kept_random_state, seed_all
from varuna_core.runtime.split.record import Record
from varuna_core.runtime.split.rehearsal import Rehearsal, uncompiled
from varuna_core.runtime.split.stage import Stub, StubPlan, Switch

log = logging.getLogger(__name__)

Step = tuple[str, tuple[tuple[int, ...], ...], str]
"""A function, the shapes of its results, and the module that called the function."""


class _Run:
    """A forward of the dry run's model, with the functions called in each segment."""

    def __init__(self, rehearsal: Rehearsal, inputs: Mapping[str, Any]) -> None:
        self.rehearsal, self.inputs = rehearsal, inputs
        self.values: list[tuple[Any, ...]] = []
        """Values that cross each cut."""

        self.steps: list[list[Step]] = [[]]
        self.switch = Switch()
        self.entry: tuple[int, tuple[Any, ...]] = -1, ()
        """In a run with stubs, the stage's first cut and the values that it passes on."""

        self.last_cut = -1
        """Cut at which the run stops."""

    def run(self, plan: StubPlan | None = None) -> None:
        rehearsal, held = self.rehearsal, self.rehearsal.record
        rehearsal.record, rehearsal.open, rehearsal.segment = Record(), [], 0
        inputs = {name: map_leaves(rehearsal._fake, value) for name, value in self.inputs.items()}
        try:
            with ExitStack() as stack:
                stack.enter_context(kept_attributes(rehearsal.model))
                stack.enter_context(kept_random_state(CPU))
                stack.enter_context(torch.no_grad())
                stack.enter_context(rehearsal.mode or nullcontext())
                stack.enter_context(uncompiled())
                for name, calls in (plan or {}).items():
                    self._put_stub(stack, name, calls)
                stack.enter_context(_Steps(self))
                stack.callback(watch, watch(self))
                seed_all(0)
                with suppress(StageEnd):
                    self._note("return", rehearsal.model(**inputs))
        finally:
            rehearsal.record = held

    def _put_stub(self, stack: ExitStack, name: str, calls: list[Any]) -> None:
        module = self.rehearsal.model.get_submodule(name)
        own = vars(module).get("forward")
        stub = Stub(module.forward, self.switch, self._advance)
        stub.load(calls, self._make)
        vars(module)["forward"] = stub
        self.switch.on = True

        def restore() -> None:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own

        stack.callback(restore)

    def _make(self, spec: TensorSpec) -> Tensor:
        device = self.rehearsal.device
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        return made.zero_()

    def _advance(self, cuts: int) -> None:
        self.values += [()] * cuts
        self.steps += [[] for _ in range(cuts)]

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        number = len(self.values)
        if number == self.entry[0]:
            values, self.switch.on = map_leaves(lambda leaf: leaf, self.entry[1]), False
        # The model may pop from a list that crossed: what is kept, and entered, is as it crossed.
        self.values.append(map_leaves(lambda leaf: leaf, values))
        if number == self.last_cut:
            raise StageEnd
        self.steps.append([])
        seed_all(number)
        return unpack(values)

    @property
    def is_live(self) -> bool:
        return not self.switch.on

    def _note(self, name: str, out: Any) -> None:
        found = tensors_of(out)
        if found and self.is_live:
            open_calls, calls = self.rehearsal.open, self.rehearsal.record.calls
            module = calls[open_calls[-1]].module if open_calls else ""
            self.steps[-1].append((name, tuple(tuple(t.shape) for t in found), module))


class _Steps(TorchFunctionMode):
    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.run._note(getattr(func, "__name__", str(func)), out)
        return out


class Replay:
    """Compares stages with the whole model; the whole model runs only once."""

    def __init__(self, rehearsal: Rehearsal, inputs: Mapping[str, Any]) -> None:
        self.rehearsal, self.inputs = rehearsal, inputs
        self._whole: _Run | None = None

    def check(self, index: int, segments: range, plan: StubPlan, record: Record) -> None:
        """Raise SplitError if a stage of these segments would compute something else than the
        recorded forward of the whole model."""
        if not segments or not segments.start or not plan:
            return
        try:
            if self._whole is None:
                self._whole = self._run()
            whole = self._whole
            alone = _Run(self.rehearsal, self.inputs)
            alone.entry = segments.start - 1, whole.values[segments.start - 1]
            alone.last_cut = segments.stop - 1
            failure = ""
            try:
                alone.run(plan)
            except Exception as error:
                if not alone.is_live:
                    raise
                failure = f"the stage alone fails with {type(error).__name__}: {error}"
        except Exception as error:  # code before a stage may want true values
            log.warning("stage %d: not compared with the whole model: %s", index, error)
            return
        found = failure or _differ(whole, alone, segments)
        if not found:
            return
        if any(_differ(whole, self._run(), segments) for _ in range(2)):  # by turns, too
            log.warning(
                "stage %d: not compared: the model runs different operations each time", index
            )
            return
        cut = f"cut {segments.start - 1} ({record.cuts[segments.start - 1].name})"
        raise SplitError(
            f"stage {index} would compute something else than the whole model after {cut}: "
            f"{found}. Modules before it leave something behind besides their results (in a hook, "
            "a list, an attribute) that is used after it: pass it through the CutPoints, or turn "
            "off what collects it (output_router_logits, output_hidden_states, output_attentions)"
        )

    def _run(self) -> _Run:
        made = _Run(self.rehearsal, self.inputs)
        made.run()
        return made


def _differ(whole: _Run, other: _Run, segments: range) -> str:
    """Describe the first difference; empty if there is none."""
    for segment in segments:
        pair = (run.steps[segment] if segment < len(run.steps) else [] for run in (whole, other))
        for ours, theirs in zip_longest(*pair):
            if ours is None or theirs is None or ours[:2] != theirs[:2]:
                return f"{_spell(ours)} becomes {_spell(theirs)}"
    return ""


def _spell(step: Step | None) -> str:
    if step is None:
        return "nothing"
    name, shapes, module = step
    where = f"module {module!r}" if module else "the model's own forward"
    return f"{name} to {', '.join(str(list(shape)) for shape in shapes)} in {where}"

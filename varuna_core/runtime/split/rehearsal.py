"""Dry run: one forward of the whole model that records the facts needed to split the model.

The dry run records which module is called in which segment and its result, where each parameter and
buffer is used, the values that cross each cut, and the cost of each segment. It uses fake tensors
(on the meta device, but with the real device's name, so that autocast and `device=x.device` work),
which need no memory for weights. If the model's code depends on tensor values, real tensors are
used.
"""

from __future__ import annotations

import copy
import copyreg
import logging
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varuna_core.runtime.comm.private_torch import may_hook_saved
from varuna_core.runtime.comm.values import is_plain, leaves_of, map_leaves, spec_of, tensors_of
from varuna_core.runtime.split.attributes import PLAIN, KeptAttributes, Place, find_stream
from varuna_core.runtime.split.cut import CutBefore, CutPoint, SplitError, StageEnd, unpack, watch
from varuna_core.runtime.split.inputs import storage_of
from varuna_core.runtime.split.kept import NOTHING_KEPT, KeptModules
from varuna_core.runtime.split.loss import COUNTS, read_form
from varuna_core.runtime.split.random_streams import kept_random_state, read_foreign_streams
from varuna_core.runtime.split.record import (
    AttributeChange,
    Call,
    Cut,
    Draw,
    OperationMode,
    Record,
    list_results,
    tensor_names,
)

log = logging.getLogger(__name__)

# Reads of a parameter that give no tensor and yet depend on its values.
VALUE_READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__"}


def list_shared_types() -> list[type]:
    """Return types of objects in a model that cannot be copied, so that copies share them."""
    shared: list[type] = [types.ModuleType, type(threading.Lock()), type(threading.RLock())]
    shared += [torch.cuda.Stream, torch.cuda.Event]
    if dist.is_available():
        shared.append(dist.ProcessGroup)
    return shared


def copy_model(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """Copy a model, but use these tensors, keyed by id, in place of its own."""
    replaced = {**list_results(model), **replaced, **keep_users_objects(model)}
    kept = dict(copyreg.dispatch_table)
    for kind in list_shared_types():
        copyreg.pickle(kind, lambda _: "shared")  # a string: deepcopy takes the object itself
    try:
        return copy.deepcopy(model, replaced)
    except (TypeError, RuntimeError) as error:
        raise SplitError(
            f"the model cannot be copied ({error}): copy.deepcopy(model) must work"
        ) from error
    finally:
        copyreg.dispatch_table.clear()
        copyreg.dispatch_table.update(kept)


def keep_users_objects(model: nn.Module) -> dict[int, Any]:
    """Return, by id, objects outside the model whose methods are hooks of its modules: the copied
    model must call the originals, not copies."""
    hooks = [
        hook
        for module in model.modules()
        for held in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
        for hook in held.values()
    ]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return {id(x): x for x in owners if x is not None and not isinstance(x, nn.Module)}


class _UseMode(TorchFunctionMode):
    """Records uses of parameters, buffers and random generators, also outside of module calls."""

    def __init__(
        self,
        names: dict[int, list[str]],
        use: Callable[[str], None],
        draw: Callable[[Any], None],
        note_unhooked: Callable[[], None],
    ) -> None:
        super().__init__()
        self.names, self.use, self.draw = names, use, draw
        self.note_unhooked = note_unhooked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not may_hook_saved():
            self.note_unhooked()
        if kwargs and kwargs.get("generator") is not None:
            self.draw(kwargs["generator"])
        used = [self.names[id(t)] for t in tensors_of((args, kwargs)) if id(t) in self.names]
        # `weight.dtype` and `weight.shape` are no use of the weight.
        if used and (tensors_of(out) or getattr(func, "__name__", "") in VALUE_READS):
            for names in used:
                for name in names:
                    self.use(name)
        return out


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled code uncompiled, since watched code cannot be compiled, and make flex attention
    accept this. Import torch's compiler only for a model that may need it."""
    if {"torch._dynamo.eval_frame", "torch.nn.attention.flex_attention"} & sys.modules.keys():
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


class Rehearsal:
    """A copy of the model on fake tensors, which runs dry once for each batch shape."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        real: bool,
        types: Mapping[int, torch.dtype] = MappingProxyType({}),
        kept: KeptModules = NOTHING_KEPT,
    ) -> None:
        self.real, self.device, self.types = real, device, types
        self.mode: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch without numpy warns at this import
            from torch._subclasses.fake_tensor import FakeTensorMode
        if not real:
            self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        replaced: dict[int, Any] = {}
        for parameter in model.parameters():
            replaced[id(parameter)] = self._stand_in(parameter)
        for buffer in model.buffers():
            if not real or buffer.is_meta or id(buffer) in self.types:
                replaced[id(buffer)] = self._stand_in(buffer)
        self.model = copy_model(model, replaced)
        kept.install(self.model)
        self.names = tensor_names(self.model)
        self.modules = {id(m): name for name, m in self.model.named_modules()}
        for module in self.model.modules():
            if not isinstance(module, CutPoint):
                for number, hook in module._forward_pre_hooks.items():
                    seen = partial(self._run_hook, hook, (self.modules[id(module)], number))
                    module._forward_pre_hooks[number] = seen
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def _run_hook(
        self, hook: Callable[..., Any], place: tuple[str, int], *args: Any, **kwargs: Any
    ) -> Any:
        before = len(self.record.cuts)
        result = hook(*args, **kwargs)
        if len(self.record.cuts) > before:
            self.record.cutting_hooks.add(place)
        return result

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor. In a run on real tensors, return the parameter itself, a copy of a
        buffer, which the run may change, or zeros for a meta tensor."""
        dtype = self.types.get(id(tensor), tensor.dtype)
        if self.real and not tensor.is_meta:
            if dtype == tensor.dtype and isinstance(tensor, nn.Parameter):
                return tensor
            made = tensor.detach().to(dtype, copy=True)
        elif self.real:
            made = torch.zeros((), dtype=dtype).expand(tensor.shape)
        else:
            with self.mode:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=dtype, device=self.device
                )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def run(
        self, inputs: Mapping[str, Any], stop: int | None = None, training: bool | None = None
    ) -> Record:
        """Run the forward; if `stop` is given, only up to that cut, ignoring costs and uses.

        Exceptions of the model are propagated. The modules' attributes are restored afterwards.
        """
        kept = KeptAttributes(self.model)
        self._attributes: _AttributeWatch | None = None
        try:
            record = self._run(inputs, stop, training)
            changed = kept.list_changed()
            if stop is None and (changed or self._streams):
                self._attributes = _AttributeWatch(self.model, changed)
                self._attributes.note_streams(self._streams)
                with suppress(Exception):  # it ran once
                    self._run(inputs, None, training)
                self.record = record
                record.attributes = self._attributes.found
        finally:
            kept.restore()
        return record

    def _run(
        self, inputs: Mapping[str, Any], stop: int | None = None, training: bool | None = None
    ) -> Record:
        model = self.model
        self.record, self.segment, self.stop = Record(real=self.real), 0, stop
        self._is_ours = False  # what runs just now: no operation of the model
        if training is not None and training != model.training:
            model.train(training)
        self.open: list[int] = []
        self.passed: set[int] = set()
        self._streams: dict[int, set[int]] = {}
        self._views: list[tuple[str, Tensor, int]] = []
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self._outdated: list[Tensor | None] = []  # kept, so that no new tensor has their storage
        self.stored: dict[int, list[str]] = {}
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *self.buffers.items(),
        ]:
            self.stored.setdefault(storage_of(tensor), []).append(name)
        fakes = {name: map_leaves(self._fake, value) for name, value in inputs.items()}
        output: Any = None
        with ExitStack() as stack:
            stack.enter_context(kept_random_state(torch.device("cpu")))
            stack.enter_context(self.mode or nullcontext())
            stack.enter_context(uncompiled())
            if stop is None:
                stack.enter_context(
                    _UseMode(self.names, self._use, self._use_stream, self._note_unhooked)
                )
                if self._attributes is not None:
                    stack.enter_context(self._attributes)
                stack.enter_context(
                    OperationMode(
                        self._spend,
                        self._read,
                        self._write,
                        self._draw,
                        self._note_composed,
                        self._see,
                    )
                )
                self.record.inputs.begin(fakes)
            stack.callback(watch, watch(self))
            foreign = pickle.dumps(read_foreign_streams())
            try:
                output = model(**fakes)
                if stop is None:
                    self.record.inputs.end(fakes, output, self.segment)
                    self.record.draws_foreign = pickle.dumps(read_foreign_streams()) != foreign
            except StageEnd:
                pass
            except Exception:
                if self.record.problem is None:
                    raise
        self._note_new_buffers()
        edited = {name for name, view, version in self._views if view._version != version}
        self.record.edited_views |= edited
        if self._attributes is not None:
            self._attributes.note(self.segment)
        if self.record.problem is not None:
            raise self.record.problem
        self.record.output = map_leaves(lambda _: None, output)
        self.record.loss = read_form(output, hasattr(self.model, COUNTS))
        return self.record

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        number = len(self.record.cuts)
        name = self._name(point) or f"the {number + 1}. CutPoint passed"
        self._check_cut(point, f"cut {number} ({name})", values)
        specs = tuple(map(spec_of, tensors_of(values)))
        self.record.cuts.append(Cut(name=name, specs=specs))
        if number == self.stop:
            raise StageEnd
        self._note_new_buffers()
        if self.stop is None:
            self._is_ours = True
            values = self.record.inputs.cross(values, number, self.segment)
            self._is_ours = False
        if self._attributes is not None:
            self._attributes.note(self.segment)
        self.segment += 1
        self.record.costs.append(0.0)
        return unpack(values)

    def _name(self, point: CutPoint) -> str:
        name = self.modules.get(id(point), "")
        return f"before {name.rpartition('.')[0]!r}" if isinstance(point, CutBefore) else name

    def _check_cut(self, point: CutPoint, name: str, values: tuple[Any, ...]) -> None:
        problem = ""
        foreign = [
            type(x).__name__
            for x in leaves_of(values)
            if not (isinstance(x, Tensor) or is_plain(x))
        ]
        if id(point) in self.passed and not point.is_repeated:
            problem = "is called twice in one forward: create one CutPoint for each call"
        elif odd := [t.layout for t in tensors_of(values) if t.layout is not torch.strided]:
            problem = (
                f"gets a tensor of layout {odd[0]}, which cannot be sent to another stage: pass "
                "its parts (values and offsets of a nested one), and build the tensor after the "
                "cut"
            )
        elif foreign:
            problem = f"gets a {foreign[0]}: pass tensors, numbers and containers of them"
        elif _is_checkpointed():
            problem = (
                "lies inside a function given to torch.utils.checkpoint: "
                "checkpoint what lies between two CutPoints"
            )
        self.passed.add(id(point))
        if problem:
            self.record.problem = SplitError(f"{name} {problem}")
            raise StageEnd

    def _enter(self, module: nn.Module, args: Any) -> None:
        parent = self.open[-1] if self.open else None
        self.open.append(len(self.record.calls))
        name = self.modules[id(module)]
        self.record.calls.append(Call(module=name, parent=parent, begin=self.segment))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.modules[id(module)]
        # A call that user code left by an exception is still open; drop down to ours.
        while self.open:
            call = self.record.calls[self.open.pop()]
            if call.module == name:
                break
        call.end = self.segment
        leaves = leaves_of(output)
        views = [x for x in tensors_of(output) if x.requires_grad and x._is_view()]
        self._views += [(name, view, view._version) for view in views]
        call.opaque = not all(is_plain(x) or _is_strided(x) for x in leaves)
        if not call.opaque:
            call.output = map_leaves(lambda x: spec_of(x) if _is_strided(x) else x, output)

    def _use(self, name: str) -> None:
        innermost = self.open[-1] if self.open else None
        self.record.uses.setdefault(name, set()).add((self.segment, innermost))
        if torch.is_grad_enabled():
            self.record.learning.add(name)

    def _use_stream(self, generator: Any) -> None:
        self._streams.setdefault(id(generator), set()).add(self.segment)

    def _see(self, name: str) -> None:
        self.record.num_operations += 1
        self.record.digest = crc32(name.encode(), self.record.digest)

    def _note_unhooked(self) -> None:
        self.record.unhooked.add(self.segment)

    def _note_composed(self) -> None:
        self.record.composed.add(self.segment)

    def _spend(self, seconds: float) -> None:
        if not self._is_ours:
            self.record.costs[-1] += seconds

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.real:
            # A copy, whatever the model does to it; the batch is the user's.
            return value.detach().clone().to(next(self.model.parameters(), value).device)
        with self.mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=self.device
            )

    def _read(self, tensors: list[Tensor]) -> None:
        if not self._is_ours:
            self.record.inputs.read(tensors, self.segment, self.open[-1] if self.open else None)

    def _draw(self, draw: Draw) -> None:
        call = self.open[-1] if self.open else None
        draw = replace(draw, is_checkpointed=_is_checkpointed(), call=call)
        self.record.draws.setdefault(self.segment, []).append(draw)

    def _write(self, written: list[Tensor]) -> None:
        self.record.inputs.write(written, self.segment, self.open[-1] if self.open else None)
        for tensor in written:
            for name in self.stored.get(storage_of(tensor), ()):
                self.record.changes.setdefault(name, set()).add(self.segment)

    def _note_new_buffers(self) -> None:
        """Record buffers that were replaced by another tensor (`self.average = ...`) as changed."""
        if self.stop is not None:
            return
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if self.buffers.get(name) is not buffer:
                self.record.changes.setdefault(name, set()).add(self.segment)
                self._outdated.append(self.buffers.get(name))
                self.buffers[name] = buffer
                self.stored.setdefault(storage_of(buffer), []).append(name)


class _AttributeWatch(TorchFunctionMode):
    """Records in which segments a second run changes attributes, and if that run reads values that
    the first run left in them."""

    def __init__(self, model: nn.Module, places: Collection[Place]) -> None:
        super().__init__()
        self.model, self.places = model, set(places)
        self.found = {place: AttributeChange() for place in places}
        self._tensors = {}
        for path, name in places:
            value = vars(model.get_submodule(path)).get(name)
            self.found[path, name].is_carried = isinstance(value, PLAIN) or bool(find_stream(value))
            if isinstance(value, Tensor):
                self._tensors[id(value)] = path, name
        # Kept, so that no new tensor has the id of one of them.
        self._held = [vars(model.get_submodule(path)).get(name) for path, name in places]
        self._kept = KeptAttributes(model, self.places)

    def note_streams(self, streams: Mapping[int, set[int]]) -> None:
        """Record the segments that use each of torch's generators (`streams`, by the id of each).

        A run on fake tensors does not advance generators, so `note` cannot see their use.
        """
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if id(value) in streams:
                    self.found[path, name] = AttributeChange(
                        segments=streams[id(value)], is_carried=True
                    )

    def note(self, segment: int) -> None:
        """Record the attributes that have changed by the end of a segment."""
        for place in self._kept.list_changed():
            self.found[place].segments.add(segment)
        self._kept = KeptAttributes(self.model, self.places)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_of((args, kwargs)):
            if id(tensor) in self._tensors:
                self.found[self._tensors[id(tensor)]].is_carried = True
        return func(*args, **(kwargs or {}))


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_checkpointed() -> bool:
    """Return True inside torch.utils.checkpoint, whose backward would pass a CutPoint again."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not Rehearsal.run.__code__:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None above the outermost
    return False


@contextmanager
def _silent_fakes() -> Iterator[None]:
    """Drop what torch logs if an operation fails on fake tensors: a traceback on standard error of
    each rank, although the run on real tensors that follows may be well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def rehearse(
    model: nn.Module,
    inputs: Mapping[str, Any],
    device: torch.device,
    types: Mapping[int, torch.dtype] = MappingProxyType({}),
    kept: KeptModules = NOTHING_KEPT,
) -> tuple[Rehearsal, Record]:
    """Run the model dry on fake tensors, or on real tensors if the model cannot run on fake ones.

    `types` holds the dtypes of parameters and buffers, by id, that differ from the model's own.
    """
    try:
        with _silent_fakes():
            rehearsal = Rehearsal(model, device, False, types, kept)
            record = rehearsal.run(inputs)
    except SplitError:
        raise
    except (
        Exception
    ):  # whatever a model raises on fake tensors; the real run tells if it is its own
        rehearsal = Rehearsal(model, device, True, types, kept)
        record = rehearsal.run(inputs)
    if not model.training:
        _add_training(rehearsal, record, inputs)
    return rehearsal, record


def _add_training(rehearsal: Rehearsal, record: Record, inputs: Mapping[str, Any]) -> None:
    """Add uses and changes in training mode to the record of a model passed in eval mode."""
    try:
        trained = rehearsal.run(inputs, training=True)
    except Exception as error:  # it may never be trained
        log.warning("the model is in eval mode; its dry run in training mode fails: %s", error)
        return
    if len(trained.cuts) != len(record.cuts):
        raise SplitError(
            f"the model passes {len(record.cuts)} CutPoints in eval mode and {len(trained.cuts)} "
            "in training mode: the two numbers must be equal"
        )
    record.in_training = trained
    for name, segments in trained.changes.items():
        record.changes.setdefault(name, set()).update(segments)
    for name, uses in trained.uses.items():
        known = {segment for segment, _ in record.uses.get(name, ())}
        # Its calls are not the record's: as if the model's own forward used it.
        new = {(segment, None) for segment, _ in uses if segment not in known}
        record.uses.setdefault(name, set()).update(new)
    record.attributes = {**record.attributes, **trained.attributes}
    record.learning |= trained.learning
    record.edited_views |= trained.edited_views
    record.draws_foreign |= trained.draws_foreign
    record.unhooked |= trained.unhooked
    record.composed |= trained.composed

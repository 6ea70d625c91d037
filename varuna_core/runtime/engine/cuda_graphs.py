"""Record a stage's forwards and backwards as CUDA graphs: `Options(cuda_graphs=True)`.

A stage's forward has hundreds of kernels, and the host may need longer to launch them than a fast
GPU needs to run them. A recorded forward takes a single launch:

    F   inputs, activations ─► fixed memory ─► forward ─► copied out
    B   gradients           ─► fixed memory ─► backward, adding to fixed buffers ─► copied out

A recording is for one stage, one batch shape, and one micro-batch in flight: the number of
recordings is the number of micro-batches in flight. Each has its own memory for activations, shared
by its F and B, which never overlap. At most NUM_SHAPES batch shapes are recorded.

The first step with a new shape runs kernel by kernel: torch.compile compiles in that step, which
also shows which outputs get a gradient. After recording, the model's Python code no longer runs.
Stages that cannot be recorded run kernel by kernel, with a warning; recomputed forwards and split
backwards do so without a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from varuna_core.runtime.comm.values import Crossing, sign
from varuna_core.runtime.engine.compiled import has_hooks
from varuna_core.runtime.engine.graph_memory import without_collection
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.split.loss import LossForm, TokenMean, pick_loss
from varuna_core.runtime.split.stage import Stage

log = logging.getLogger(__name__)
T = TypeVar("T")
KNOWN = (Tensor, bool, int, str)
"""Types of inputs whose shapes (for tensors) or values become part of a key."""
IDLE_STEPS = 100
"""Steps without use after which the recordings for a batch shape are dropped."""

NUM_SHAPES = 4
"""Maximum number of batch shapes recorded for a stage; each needs memory for its activations."""

Got = tuple[bool, ...]
"""For each output of a stage, True if the output gets a gradient."""

Add = Callable[[Sequence[tuple[nn.Parameter, Tensor]], Tensor], None]
"""Function that adds parameters' gradients, multiplied by a factor, to their accumulated sums."""


class Recorder(Protocol):
    """Records the work of a device for replay."""

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Run `work`; return its result in fixed memory, and a function that repeats the work into
        that memory. Recordings of one recorder must not run at the same time."""


class BrokenRecording(Exception):
    """Raised if a recording failed and torch cannot continue afterwards."""


class CudaRecorder:
    """Records CUDA graphs in its own memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: untyped
        self.pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph: Any = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.stream.device)
        # A recording cannot take memory that the allocator keeps for others, nor free it.
        torch.cuda.empty_cache()
        self.stream.wait_stream(current)
        # A collection may find an older recording that nobody holds; CUDA breaks off a recording
        # in which another one is freed.
        with torch.cuda.stream(self.stream), without_collection():
            # Receivers' threads go on meanwhile: what they do is no part of it, nor forbidden.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                made = work()
            except Exception as error:
                self._end(graph, error)
                raise
            graph.capture_end()
        current.wait_stream(self.stream)
        return made, graph.replay

    def _end(self, graph: Any, error: Exception) -> None:
        """End a failed recording. After an operation that CUDA refused, torch before 2.12 behaves
        as if it were still recording, and never frees memory used by other streams."""
        try:
            graph.capture_end()
        except RuntimeError:
            if TorchVersion(torch.__version__) < "2.12":
                raise BrokenRecording(
                    "a stage could not be recorded as CUDA graphs, and this torch cannot "
                    "continue after that: omit cuda_graphs, or use torch 2.12. "
                    f"{name_error(error)}"
                ) from error


def why_none_recorded(tensor: int, zero: int, device: torch.device) -> str:
    """Return why CUDA graphs are unsupported in this layout; empty if they are supported."""
    if device.type != "cuda":
        return "a device other than a GPU"
    if tensor > 1:
        return "tensor above 1: sharded layers exchange messages"
    if zero > 1:
        return f"zero={zero}: gradients or weights are exchanged between micro-batches"
    return ""


def why_not(stage: Stage) -> str:
    """Return why this stage cannot be recorded; empty if it can."""
    records = [one for one in (stage.record, stage.record.in_training) if one is not None]
    if any(draw for one in records for draw in one.draws.values()):
        return "the model draws random numbers, such as for dropout"
    hooked = [name for name, part in stage.module.named_modules() if has_hooks(part, stage.refuse)]
    if hooked:
        return f"module {hooked[0]!r} has hooks, which would run only once, while recording"
    return ""


class Recording:
    """A recorded forward and backward of a stage, with memory for one micro-batch."""

    def __init__(
        self,
        stage: Stage,
        form: LossForm,
        got: Got,
        inputs: Sequence[Tensor],
        tree: Callable[[Sequence[Tensor]], Any],
        received: Crossing | None,
        recorder: Recorder,
        add: Add,
    ) -> None:
        self._stage, self._form, self._got, self._tree, self._add = stage, form, got, tree, add
        self._inputs = [tensor.clone() for tensor in inputs]
        held = [tensor.detach().clone() for tensor in received.tensors] if received else []
        self._crossing = received and received._replace(tensors=tuple(held))
        self._received = held
        self._parameters = [p for p in _once(stage.parameters().values()) if p.requires_grad]
        self.trained: tuple[nn.Parameter, ...] = ()
        """Parameters that get a gradient."""

        self._starts: list[Tensor] = []
        self._read = list_attributes(stage.module)
        self._output, self._replay_forward = recorder.record(self._run_forward)
        self._read += [*list_attributes(stage.module), *stage.list_stub_outputs()]
        """Other tensors that are read, and written by code before the stage: their memory stays."""

        self._seeds = [torch.ones_like(start) for start in self._starts]
        device = stage.device
        self._factor, self._last_factor = torch.ones((), device=device), 1.0
        self._gradients, self._replay_backward = recorder.record(self._run_backward)

    def _run_forward(self) -> Any:
        output = self._run_module(self._crossing)
        if isinstance(output, Crossing):
            if output.structure is None or not output.structure.is_flat:
                raise RuntimeError("values other than tensors cross the cut after the stage")
            pairs = zip(output.tensors, self._got, strict=True)
            self._starts = [tensor for tensor, has in pairs if has and tensor.requires_grad]
            return output
        loss = pick_loss(output, self._form.path)
        starts = [t for t, _ in loss.terms] if isinstance(loss, TokenMean) else [loss]
        self._starts = [start for start in starts if start.requires_grad]
        return output

    def _run_module(self, received: Crossing | None) -> Any:
        held = [(module, dict(module._buffers)) for module in self._stage.module.modules()]
        output = self._stage.forward(self._tree(self._inputs), received, None)
        for module, before in held:
            if any(module._buffers.get(name) is not buffer for name, buffer in before.items()):
                module._buffers.update(before)
                raise RuntimeError("the forward replaces a buffer by another tensor")
        return output

    def _run_backward(self) -> list[Tensor | None]:
        entered = [t for t in self._received if t.requires_grad]
        if not self._starts:
            return [None] * len(self._received)
        wanted = [*entered, *self._parameters]
        made = torch.autograd.grad(self._starts, wanted, self._seeds, allow_unused=True)
        pairs = zip(self._parameters, made[len(entered) :], strict=True)
        got = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        self.trained = tuple(parameter for parameter, _ in got)
        self._add(got, self._factor)
        by_place = dict(zip(map(id, entered), made, strict=False))
        return [by_place.get(id(tensor)) for tensor in self._received]

    @torch.no_grad()
    def forward(self, inputs: Mapping[str, Any], received: Crossing | None) -> Any:
        """Run the forward. Return a crossing in new memory; on the last stage, return the model's
        output, which is valid until the next forward."""
        values = [*list_tensors(inputs), *(() if received is None else received.tensors)]
        torch._foreach_copy_([*self._inputs, *self._received], values)
        self._replay_forward()
        if not isinstance(self._output, Crossing):
            return self._output
        leaving = []
        for tensor in self._output.tensors:
            copied = tensor.detach().clone()
            leaving.append(copied.requires_grad_(tensor.requires_grad))
        return self._output._replace(tensors=tuple(leaving))

    @torch.no_grad()
    def backward(
        self, starts: Sequence[Tensor], gradients: Sequence[Tensor | None], factor: float
    ) -> list[Tensor | None]:
        """Run the backward, and return the gradients of the received tensors. `starts` holds the
        gradients of the outputs that get one, `gradients` those of all outputs."""
        if gradients and find_got(gradients) != self._got:
            raise RuntimeError(
                "other outputs of a stage get gradients than when the stage was recorded: use "
                "cuda_graphs only for models in which this does not depend on the data"
            )
        if self._seeds:
            torch._foreach_copy_(self._seeds, list(starts))
        if factor != self._last_factor:
            self._factor.fill_(factor)
            self._last_factor = factor
        self._replay_backward()
        return [None if gradient is None else gradient.clone() for gradient in self._gradients]


def list_attributes(model: nn.Module) -> list[Any]:
    """Return the tensors that modules hold as plain attributes, such as masks."""
    return [
        leaf
        for module in model.modules()
        for leaf in pytree.tree_leaves(list(vars(module).values()))
        if isinstance(leaf, Tensor)
    ]


def name_error(error: Exception) -> str:
    lines = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {lines[0]:.200}"


def find_got(gradients: Iterable[Tensor | None]) -> Got:
    return tuple(gradient is not None for gradient in gradients)


def list_tensors(inputs: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(dict(inputs)) if isinstance(leaf, Tensor)]


def _build_join(inputs: Mapping[str, Any]) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that rebuilds such inputs from other tensors."""
    leaves, tree = pytree.tree_flatten(dict(inputs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place in places:
        leaves[place] = None

    def join(tensors: Sequence[Tensor]) -> Any:
        full = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            full[place] = tensor
        return pytree.tree_unflatten(full, tree)

    return join


def _once(tensors: Iterable[T]) -> list[T]:
    return [*{id(tensor): tensor for tensor in tensors}.values()]


class CudaGraphs:
    """All recordings of one rank's stages."""

    def __init__(
        self,
        stages: Sequence[Stage],
        form: LossForm,
        make_recorder: Callable[[], Recorder],
        add: Add,
        compute_factor: Callable[[], float],
        on_made: Callable[[nn.Parameter], None],
    ) -> None:
        """`compute_factor` returns the factor for the next backward's gradients; `on_made` is
        called with each parameter that gets a gradient in that backward."""
        self._form, self._make_recorder, self._add = form, make_recorder, add
        self._find_factor, self._on_made = compute_factor, on_made
        self._stages = {stage.index: stage for stage in stages}
        self._left: set[int] = set()
        """Stages that cannot be recorded."""

        self._known: dict[Any, Got] = {}
        self._seen: dict[Any, Got] = {}
        self._free: dict[Any, list[Recording]] = {}
        """Recordings that no micro-batch uses at present."""

        self._used: dict[Any, int] = {}
        """The step in which each key was last used."""

        self._step = 0
        self._addresses: Any = None
        self._told: set[tuple[int, str]] = set()
        self.num_made = 0
        for stage in stages:
            if reason := why_not(stage):
                self._give_up(stage, reason)

    def _give_up(self, stage: Stage, reason: str) -> None:
        self._left.add(stage.index)
        self._forget(key for key in self._used if key[0] == stage.index)
        log.warning("stage %d: no CUDA graphs: %s", stage.index, reason)

    def _forget(self, keys: Iterable[Any]) -> None:
        for key in [*keys]:
            for held in (self._known, self._free, self._used):
                held.pop(key, None)

    def begin_step(self) -> None:
        """Begin a step. Shapes seen in a complete step may now be recorded, and recordings are
        dropped if their weights have moved in memory."""
        self._known |= {key: got for key, got in self._seen.items() if key[0] not in self._left}
        self._seen = {}
        self._step += 1
        self._forget(key for key, step in self._used.items() if step < self._step - IDLE_STEPS)
        held: list[Tensor] = []
        for stage in self._stages.values():
            held += [*stage.module.parameters(), *stage.module.buffers()]
        addresses = [(tensor.data_ptr(), tensor.requires_grad) for tensor in held]
        if addresses != self._addresses:
            self._free.clear()
        self._addresses = addresses

    def find_key(self, stage: Stage, micro: MicroBatch, received: Crossing | None) -> Any:
        """Return the key of this micro-batch's recordings; None if it cannot be recorded."""
        if stage.index in self._left or not torch.is_grad_enabled():
            return None
        structure = None if received is None else received.structure
        if structure is not None and not structure.is_flat:
            return None
        tensors = () if received is None else received.tensors
        leaves = pytree.tree_leaves(dict(micro.inputs))
        if not all(leaf is None or isinstance(leaf, KNOWN) for leaf in leaves):
            return None  # their values are no part of a key
        strides = tuple(tensor.stride() for tensor in tensors)
        key = (stage.index, stage.key_of(micro.inputs), sign(tensors), strides, structure)
        self._used[key] = self._step
        return key

    def learn(self, key: Any, gradients: Iterable[Tensor | None]) -> None:
        """Record which outputs got a gradient in a backward that ran kernel by kernel."""
        if key is not None:
            self._seen[key] = find_got(gradients)

    def find(self, key: Any, micro: MicroBatch, received: Crossing | None) -> Recording | None:
        """Return an unused recording; None if the action must run kernel by kernel."""
        if key is None or key not in self._known:
            return None
        if self._free.get(key):
            return self._free[key].pop()
        stage = self._stages[key[0]]
        if key not in self._free:
            if sum(other[0] == key[0] for other in self._free) == NUM_SHAPES:
                self._tell_once(stage, f"at most {NUM_SHAPES} shapes of batches are recorded")
                return None
            self._free[key] = []
        inputs = list_tensors(micro.inputs)
        try:
            recording = Recording(
                stage, self._form, self._known[key], inputs, _build_join(micro.inputs), received,
                self._make_recorder(), self._add,
            )  # fmt: skip
        except BrokenRecording:
            raise
        except Exception as error:  # of CUDA or a compiler; without a recording it has run
            self._give_up(stage, name_error(error))
            return None
        self._tell_once(stage, "forwards and backwards are recorded as CUDA graphs", logging.INFO)
        self.num_made += 1
        return recording

    def _tell_once(self, stage: Stage, words: str, level: int = logging.WARNING) -> None:
        if (stage.index, words) not in self._told:
            self._told.add((stage.index, words))
            log.log(level, "stage %d: %s", stage.index, words)

    def run_backward(
        self,
        key: Any,
        recording: Recording,
        starts: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Run `Recording.backward`, and release the recording for another micro-batch."""
        made = recording.backward(starts, gradients, self._find_factor())
        if key in self._free:
            self._free[key].append(recording)
        for parameter in recording.trained:
            self._on_made(parameter)
        return made

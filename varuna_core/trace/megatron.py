"""Trace megatron-core's schedules: forward and backward of a micro-batch, and waits.

Every schedule since megatron-core 0.4 calls `schedules.forward_step` and `backward_step` for each
micro-batch; a backward is matched by the output tensor that its forward returned.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

from varuna_core.trace.recorder import Call, Recorder, find_argument, wrap

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
MESSAGES = "megatron.core.pipeline_parallel.p2p_communication"
_TRAINING = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_RECEIVING = (
    "recv_forward",
    "recv_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)
_SENDING = ("send_forward", "send_backward")


GRADIENTS = "megatron.core.distributed.finalize_model_grads"
OPTIMIZERS = "megatron.core.optimizer.optimizer"


class Schedules:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._chunks: dict[int, int] = {}
        """Index of each model chunk among the chunks of this rank, keyed by the chunk's id."""
        self._forwards: dict[int, int] = {}
        """Number of forwards that each chunk has done in this step, keyed by the index of the
        chunk."""
        self._done: dict[int, tuple[int, int]] = {}
        """(stage, micro-batch) of each forward whose backward has not run yet, keyed by the id of
        the forward's output, which the engine keeps alive until then."""
        self._pipeline, self._position = 1, 0

    def apply(self, module: ModuleType) -> None:
        for name in _TRAINING:
            wrap(module, name, self._run_step)
        found = [wrap(module, "forward_step", self._forward)]
        found.append(wrap(module, "backward_step", self._backward))
        if not all(found):
            raise LookupError("Megatron's schedules have no forward_step and backward_step")
        for name in _RECEIVING:
            wrap(module, name, self._recorder.ask)
        for name in _SENDING:
            wrap(module, name, partial(self._recorder.span, "send"))

    def apply_to_messages(self, module: ModuleType) -> None:
        """Record the messages of megatron-core 0.14 and later, by wrapping the methods of
        `P2PCommunicator`. Earlier versions send and receive in functions of their schedules, which
        `apply` wraps."""
        owner = getattr(module, "P2PCommunicator", None)
        if owner is not None:
            for name in _RECEIVING:
                wrap(owner, name, self._recorder.ask)
            for name in _SENDING:
                wrap(owner, name, partial(self._recorder.span, "send"))

    def apply_to_gradients(self, module: ModuleType) -> None:
        wrap(module, "finalize_model_grads", partial(self._recorder.span, "all-reduce"))

    def apply_to_optimizers(self, module: ModuleType) -> None:
        for owner in vars(module).values():
            if isinstance(owner, type) and "step" in vars(owner):
                wrap(owner, "step", partial(self._recorder.span, "optimizer"))

    def _run_step(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Record a call of a schedule as one step, unless it only evaluates."""
        if kwargs.get("forward_only"):
            return self._recorder.span("evaluate", call, *args, **kwargs)
        recorder = self._recorder
        model = kwargs.get("model")
        models = model if isinstance(model, list) else [model]
        self._chunks = {id(chunk): index for index, chunk in enumerate(models)}
        self._forwards, self._done = {}, {}
        if not recorder.is_driven:
            recorder.is_driven = True
            self._read_place(kwargs.get("pg_collection"))
            stages = [self._compute_stage(index) for index in range(len(models))]
            recorder.place(stages, _compute_replica(kwargs.get("pg_collection")))
        return recorder.run_step(_read_iteration(), call, *args, **kwargs)

    def _read_place(self, groups: Any) -> None:
        if groups is not None and getattr(groups, "pp", None) is not None:
            self._pipeline, self._position = groups.pp.size(), groups.pp.rank()
            return
        state = sys.modules["megatron.core.parallel_state"]
        self._pipeline = state.get_pipeline_model_parallel_world_size()
        self._position = state.get_pipeline_model_parallel_rank()

    def _compute_stage(self, chunk: int) -> int:
        return chunk * self._pipeline + self._position

    def _forward(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.is_busy():
            return call(*args, **kwargs)
        chunk = self._chunks.get(id(find_argument("model", 2, args, kwargs)), 0)
        micro_batch = kwargs.get("current_microbatch")
        if micro_batch is None:
            micro_batch = self._forwards.get(chunk, 0)
        self._forwards[chunk] = micro_batch + 1
        stage = self._compute_stage(chunk)
        found = self._recorder.act("F", stage, micro_batch, call, *args, **kwargs)
        output = found[0] if isinstance(found, tuple) else found
        self._done[_identify(output)] = stage, micro_batch
        return found

    def _backward(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        output = find_argument("output_tensor", 1, args, kwargs)
        place = self._done.pop(_identify(output), None)
        if place is None or self._recorder.is_busy():
            return call(*args, **kwargs)
        return self._recorder.act("B", *place, call, *args, **kwargs)


def _identify(output: Any) -> int:
    """Return the identity of a tensor, also if it is the only item of a list."""
    while isinstance(output, (list, tuple)) and output:
        output = output[0]
    return id(output)


def _compute_replica(groups: Any) -> int:
    for name in ("dp", "dp_cp"):
        group = getattr(groups, name, None) if groups is not None else None
        if group is not None:
            return int(group.rank())
    if groups is not None:
        return 0
    return int(sys.modules["megatron.core.parallel_state"].get_data_parallel_rank())


def _read_iteration() -> int | None:
    """Return the step number that Megatron-LM prints; None for other scripts."""
    state = sys.modules.get("megatron.training.global_vars") or sys.modules.get(
        "megatron.global_vars"
    )
    arguments = getattr(state, "_GLOBAL_ARGS", None)
    done = getattr(arguments, "curr_iteration", None)
    return None if done is None else int(done) + 1

"""Trace DeepSpeed: instructions of its pipelines, and its engine's forward, backward and step."""

from __future__ import annotations

import os
import weakref
from functools import partial
from types import ModuleType
from typing import Any

from varuna_core.trace.recorder import Call, Recorder, is_training, wrap

PIPELINE = "deepspeed.runtime.pipe.engine"
ENGINE = "deepspeed.runtime.engine"


class Instructions:
    """Wraps the instructions that a rank's pipeline engine executes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_forwards = 0
        self._held: dict[int, int] = {}
        """Micro-batch whose activations each buffer holds, keyed by the buffer."""

    def apply(self, module: ModuleType) -> None:
        owner = module.PipelineEngine
        around: dict[str, Call] = {
            "ForwardPass": self._forward,
            "BackwardPass": self._backward,
            "RecvActivation": self._recorder.ask,
            "RecvGrad": self._recorder.ask,
            "SendActivation": partial(self._recorder.span, "send"),
            "SendGrad": partial(self._recorder.span, "send"),
            "LoadMicroBatch": self._recorder.read,
            "ReduceGrads": partial(self._recorder.span, "all-reduce"),
            "ReduceTiedGrads": partial(self._recorder.span, "all-reduce"),
            "OptimizerStep": partial(self._recorder.span, "optimizer"),
        }
        known = {kind.__name__: kind for kind in owner._INSTRUCTION_MAP}
        missing = {"ForwardPass", "BackwardPass"} - known.keys()
        if missing:
            raise LookupError(f"DeepSpeed's pipelines have no {' and '.join(sorted(missing))}")
        changed = dict(owner._INSTRUCTION_MAP)
        for name, kind in known.items():
            if name in around:
                changed[kind] = _bind(around[name], changed[kind])
        owner._INSTRUCTION_MAP = changed
        wrap(owner, "train_batch", self._train)
        wrap(owner, "eval_batch", partial(self._recorder.span, "evaluate"))

    def _train(self, call: Call, engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        self._num_forwards, self._held = 0, {}
        if not recorder.is_driven:
            recorder.is_driven = True
            grid = engine.grid
            recorder.place([int(engine.stage_id)], int(grid.get_data_parallel_rank()))
        number = int(engine.global_steps) + 1
        return recorder.run_step(number, call, engine, *args, **kwargs)

    def _forward(self, call: Call, engine: Any, buffer_id: int) -> Any:
        if self._recorder.is_busy():
            return call(engine, buffer_id)
        micro_batch = self._num_forwards
        self._num_forwards += 1
        self._held[buffer_id] = micro_batch
        return self._recorder.act("F", int(engine.stage_id), micro_batch, call, engine, buffer_id)

    def _backward(self, call: Call, engine: Any, buffer_id: int) -> Any:
        micro_batch = self._held.get(buffer_id)
        if micro_batch is None or self._recorder.is_busy():
            return call(engine, buffer_id)
        return self._recorder.act("B", int(engine.stage_id), micro_batch, call, engine, buffer_id)


def _bind(around: Call, call: Call) -> Call:
    """Return a function that calls `around` with `call` and the arguments. DeepSpeed's engine binds
    the function to itself as a method."""

    def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return around(call, engine, *args, **kwargs)

    return method


class Engine:
    """Wraps a DeepSpeedEngine without a pipeline, whose script calls forward, backward and step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first: weakref.ref[Any] | None = None
        """Weak reference to the engine whose steps are counted, the first one if a script has
        several."""

    def apply(self, module: ModuleType) -> None:
        owner = module.DeepSpeedEngine
        wrap(owner, "forward", self._forward)
        wrap(owner, "backward", self._backward)
        wrap(owner, "step", self._step)
        wrap(owner, "save_checkpoint", partial(self._recorder.span, "checkpoint"))

    def _forward(self, call: Call, engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if recorder.is_busy() or not (engine.training and is_training()):
            return call(engine, *args, **kwargs)
        if not recorder.is_driven:
            rank = os.environ.get("RANK", "")
            recorder.place(None, int(rank) if rank.isdecimal() else 0)
        if not recorder.is_driven or (self._first is not None and self._first() is None):
            recorder.is_driven, self._first = True, weakref.ref(engine)
            recorder.begin_step(int(engine.global_steps) + 1)
        elif self._is_first(engine) and not recorder.is_cut:
            recorder.begin_step(int(engine.global_steps) + 1)
        return recorder.act("F", 0, self._find(engine), call, engine, *args, **kwargs)

    def _backward(self, call: Call, engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.is_busy():
            return call(engine, *args, **kwargs)
        return self._recorder.act("B", 0, self._find(engine), call, engine, *args, **kwargs)

    def _step(self, call: Call, engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = self._recorder.span("optimizer", call, engine, *args, **kwargs)
        if self._is_first(engine) and self._find(engine) == 0:
            self._recorder.is_cut = False
        return found

    def _find(self, engine: Any) -> int:
        return int(engine.micro_steps) % max(1, int(engine.gradient_accumulation_steps()))

    def _is_first(self, engine: Any) -> bool:
        return self._first is not None and self._first() is engine

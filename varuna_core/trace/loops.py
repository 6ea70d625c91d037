"""Trace a script's own loop over torch: batches, backward, the optimizer, DDP and FSDP2.

Such a loop does not mark its steps. So each call of the optimizer that was called first ends a
step, and the next traced activity begins the next step.
"""

from __future__ import annotations

import os
import time
import weakref
from functools import partial
from types import ModuleType
from typing import Any

from varuna_core import trace
from varuna_core.records.logs.trace import CONTINUED
from varuna_core.trace.recorder import Call, Recorder, is_compiling, is_training, wrap

OPTIMIZERS = "torch.optim.optimizer"
BACKWARD = "torch.autograd"
LOADERS = "torch.utils.data.dataloader"
PARALLEL = "torch.nn.parallel.distributed"
SHARDED = "torch.distributed.fsdp._fully_shard._fsdp_state"
GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
VARUNA = "varuna_core.varuna"


class Loop:
    """Traces a rank's loop, unless an engine drives it or the script marks its own spans."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._mark: weakref.ref[Any] | None = None
        """Weak reference to the optimizer whose calls end the steps of the loop."""
        self._read_at: tuple[float, float] | None = None
        """Begin and end of the last read of a batch before the trace was open; the read belongs to
        the first step."""
        self._evaluated: float | None = None
        """End of the last read of a batch without gradients since the last step, from which the
        evaluation's next part begins; None if there was no such read."""
        self._is_open = False
        self._num_forwards = 0
        self._free: float | None = None
        """Time since which the loop has run code that is not traced, such as the forward of a model
        outside of DDP and FSDP2."""
        self._update: Any = None
        self._updating: Any = None
        """The optimizer whose update is in progress; another optimizer's update within it is a part
        of it."""
        self._is_off = False
        self._sharded: Any = None
        """FSDP2's state of the outermost module whose forward is in progress."""
        self._forwarding: Any = None

    def apply_to_optimizers(self, module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(self._begin_update)
        module.register_optimizer_step_post_hook(self._end_update)

    def apply_to_backward(self, module: ModuleType) -> None:
        wrap(module, "backward", self._backward)

    def apply_to_loaders(self, module: ModuleType) -> None:
        wrap(module._BaseDataLoaderIter, "__next__", self._read)

    def apply_to_parallel(self, module: ModuleType) -> None:
        wrap(module.DistributedDataParallel, "forward", self._forward)

    def apply_to_sharded(self, module: ModuleType) -> None:
        owner = module.FSDPState
        found = [wrap(owner, "_pre_forward", self._begin_forward)]
        found.append(wrap(owner, "_post_forward", self._end_forward))
        if not all(found):
            raise LookupError("FSDPState has no _pre_forward and _post_forward")
        wrap(owner, "_root_post_backward_final_callback", self._reduce)

    def apply_to_groups(self, module: ModuleType) -> None:
        """Wrap the parameter groups that FSDP2 gathers and reduces together."""
        owner = module.FSDPParamGroup
        wrap(owner, "unshard", partial(self._gather, False))
        wrap(owner, "wait_for_unshard", partial(self._gather, True))
        wrap(owner, "post_backward", self._reduce_group)

    def leave(self, module: ModuleType) -> None:
        """Stop tracing the loop, since Varuna writes its own trace."""
        self._is_off = True

    def _is_ours(self) -> bool:
        recorder = self._recorder
        return not (self._is_off or recorder.is_driven or trace.has_own or recorder.is_busy())

    def _begin(self) -> None:
        """Begin a step unless one is open."""
        if not self._is_open:
            self._is_open, self._num_forwards = True, 0
            read_at, self._read_at = self._read_at, None
            if not trace.is_open() and "VJOB_REPLICA" not in os.environ:
                rank = os.environ.get("RANK", "")
                self._recorder.place(None, int(rank) if rank.isdecimal() else 0)
            self._recorder.begin_step(at=read_at[0] if read_at else None)
            writer = trace.get_writer()
            if writer is not None and read_at:
                writer.add("data", *read_at)
            self._evaluated = None

    def _read(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        if self._is_off or trace.has_own:
            return call(*args, **kwargs)
        began, is_ours = time.perf_counter(), self._is_ours()
        if is_ours and trace.is_open() and not self._is_open and not is_training():
            return self._evaluate(began, call, *args, **kwargs)
        if is_ours and trace.is_open():
            self._begin()
        try:
            return self._recorder.read(call, *args, **kwargs)
        finally:
            if is_ours:
                self._free = time.perf_counter()
                # An engine may take the first batch, and say where the rank stands.
                self._read_at = None if trace.is_open() else (began, self._free)

    def _evaluate(self, began: float, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Record a read of a batch without gradients as an evaluation, which lasts until the end of
        this read from the end of the previous such read, or from the begin of this one if it is the
        first."""
        self._recorder.end_step()
        since, what = (began, "") if self._evaluated is None else (self._evaluated, CONTINUED)
        try:
            return call(*args, **kwargs)
        finally:
            self._evaluated = time.perf_counter()
            writer = trace.get_writer()
            if writer is not None:
                writer.add("evaluate", since, self._evaluated, what=what)

    def _forward(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        if not self._is_ours() or not is_training():
            return call(*args, **kwargs)
        self._begin()
        self._free = None
        self._num_forwards += 1
        return self._recorder.act("F", 0, self._num_forwards - 1, call, *args, **kwargs)

    def _begin_forward(self, call: Call, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        if state is self._sharded and not getattr(state, "_modules_to_run_forward", None):
            self._close_forward()  # its last forward has raised
        if self._is_ours() and is_training():
            self._begin()
            self._free = None
            self._num_forwards += 1
            self._sharded = state
            self._forwarding = self._recorder.open("F", 0, self._num_forwards - 1)
        return call(state, *args, **kwargs)

    def _end_forward(self, call: Call, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(state, *args, **kwargs)
        finally:
            if state is self._sharded:
                self._close_forward()

    def _close_forward(self) -> None:
        span, self._forwarding, self._sharded = self._forwarding, None, None
        self._recorder.close(span)

    def _gather(self, is_end: bool, call: Call, group: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Record the call that begins an all-gather or, if `is_end`, the call that waits for its
        end; over gloo, the former waits."""
        has_begun = group._all_gather_result is not None
        if has_begun is not is_end or group.is_unsharded:
            return call(group, *args, **kwargs)
        return self._wait("all-gather", call, group, *args, **kwargs)

    def _reduce_group(self, call: Call, group: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not group.reduce_grads:
            return call(group, *args, **kwargs)
        return self._wait("reduce-scatter", call, group, *args, **kwargs)

    def _reduce(self, call: Call, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not state._state_ctx.is_last_backward:
            return call(state, *args, **kwargs)
        return self._wait("reduce-scatter", call, state, *args, **kwargs)

    def _wait(self, what: str, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Record a wait, even if an engine drives the loop (torch's pipelining), but not in
        evaluation."""
        is_part = self._recorder.is_busy() or is_training()
        if self._is_off or trace.has_own or not is_part:
            return call(*args, **kwargs)
        return self._recorder.wait_within(what, call, *args, **kwargs)

    def _backward(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        if not self._is_ours():
            return call(*args, **kwargs)
        self._begin()
        writer = trace.get_writer()
        if writer is not None and self._free is not None:
            writer.add("compute", self._free, writer.now(), what="before backward")
        micro_batch = max(0, self._num_forwards - 1)
        try:
            return self._recorder.act("B", 0, micro_batch, call, *args, **kwargs)
        finally:
            self._free = time.perf_counter()

    def _begin_update(self, optimizer: Any, *_: Any) -> None:
        if is_compiling():
            return
        if optimizer is self._updating:  # its last update has raised
            self._end_update(optimizer)
        if self._is_off or trace.has_own or self._recorder.is_busy():
            return
        if not self._recorder.is_driven:
            self._begin()
        self._update, self._updating = self._recorder.open("optimizer"), optimizer

    def _end_update(self, optimizer: Any, *_: Any) -> None:
        if is_compiling() or optimizer is not self._updating:
            return
        update, self._update, self._updating = self._update, None, None
        self._recorder.close(update)
        if self._mark is None or self._mark() is None:
            self._mark = weakref.ref(optimizer)
        self._free = time.perf_counter()
        if self._mark() is optimizer and not self._recorder.is_driven:
            self._is_open, self._free = False, None
            self._recorder.is_cut = False

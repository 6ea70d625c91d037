"""Trace torch.distributed.pipelining: a stage's forwards and backwards, and its waits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from varuna_core.trace.recorder import Call, Recorder, find_argument, wrap

STAGE = "torch.distributed.pipelining.stage"
SCHEDULES = "torch.distributed.pipelining.schedules"
_ACTIONS = {
    "forward_one_chunk": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
}


class Stages:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def apply(self, module: ModuleType) -> None:
        owner = module._PipelineStageBase
        for name, kind in _ACTIONS.items():
            if not wrap(owner, name, self._make(kind)):
                raise LookupError(f"its stages have no {name}")

    def apply_to_schedules(self, module: ModuleType) -> None:
        wrap(module, "_batch_p2p", self._recorder.ask)
        wrap(module, "_wait_batch_p2p", self._recorder.ask)
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            wrap(getattr(module, name), "step", self._step)

    def _make(self, kind: str) -> Call:
        def act(call: Call, stage: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.is_busy():
                return call(stage, *args, **kwargs)
            names = "fwd_chunk_id" if kind == "F" else "bwd_chunk_id"
            chunk = find_argument(names, 0, args, kwargs)
            is_split = kind == "B" and kwargs.get("full_backward") is False
            return self._recorder.act(
                "I" if is_split else kind,
                int(stage.stage_index),
                int(chunk or 0),
                call,
                stage,
                *args,
                **kwargs,
            )

        return act

    def _step(self, call: Call, schedule: Any, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if not getattr(schedule, "_has_backward", True):  # its `eval`, or one without a loss
            return recorder.span("evaluate", call, schedule, *args, **kwargs)
        if not recorder.is_driven:
            recorder.is_driven = True
            stages = getattr(schedule, "_stages", None) or [schedule._stage]
            recorder.place(
                [int(stage.stage_index) for stage in stages], _compute_replica(stages[0])
            )
        return recorder.run_step(None, call, schedule, *args, **kwargs)


def _compute_replica(stage: Any) -> int:
    """Compute the replica from a pipeline's ranks, which are adjacent or evenly spaced."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
    width = dist.get_world_size() // len(ranks)
    is_adjacent = len(ranks) < 2 or ranks[1] - ranks[0] == 1
    return ranks[0] // len(ranks) if is_adjacent else ranks[0] % max(1, width)

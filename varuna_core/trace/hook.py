"""Add the timeline to engines other than Varuna as soon as a rank's Python imports them.

    megatron-core            schedules, messages, gradients, optimizers
    DeepSpeed                instructions of pipelines; forward, backward and step of the engine
    torch's pipelining       stages and schedules
    a script's own loop      DDP's and FSDP2's forward, FSDP2's waits, backward, the optimizer,
                             batches of a DataLoader

This module imports no engine; `start` only adds a few entries to a table.
"""

from __future__ import annotations

import os

from varuna_core.trace import deepspeed, loops, megatron, pipelining
from varuna_core.trace.imports import watch
from varuna_core.trace.recorder import Recorder


def start() -> None:
    """Watch for the engines' imports; call this once, in a rank's own process."""
    if not os.environ.get("VJOB_TRACE"):
        return
    recorder = Recorder()
    schedules = megatron.Schedules(recorder)
    stages = pipelining.Stages(recorder)
    loop = loops.Loop(recorder)
    watch(
        {
            megatron.SCHEDULES: schedules.apply,
            megatron.MESSAGES: schedules.apply_to_messages,
            megatron.GRADIENTS: schedules.apply_to_gradients,
            megatron.OPTIMIZERS: schedules.apply_to_optimizers,
            deepspeed.PIPELINE: deepspeed.Instructions(recorder).apply,
            deepspeed.ENGINE: deepspeed.Engine(recorder).apply,
            pipelining.STAGE: stages.apply,
            pipelining.SCHEDULES: stages.apply_to_schedules,
            loops.OPTIMIZERS: loop.apply_to_optimizers,
            loops.BACKWARD: loop.apply_to_backward,
            loops.LOADERS: loop.apply_to_loaders,
            loops.PARALLEL: loop.apply_to_parallel,
            loops.SHARDED: loop.apply_to_sharded,
            loops.GROUPS: loop.apply_to_groups,
            loops.VARUNA: loop.leave,
        }
    )

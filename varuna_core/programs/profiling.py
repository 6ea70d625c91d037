"""Profile a built-in program: run its model on random samples, on the ranks of a job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from varuna_core.profiling.profile_file import copy_file
from varuna_core.profiling.profiler import Profiler
from varuna_core.programs.batches import TRAIN, Batch, MadeUp
from varuna_core.programs.building import build_model, choose_apex, make_optimizer, plan_layers
from varuna_core.programs.float8 import FP8, choose_base_precision, use_float8
from varuna_core.programs.layers import compile_blocks
from varuna_core.programs.place import Place, ProgramError
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.records.training import Training, name_shapes
from varuna_core.runtime.optim.optimizers import use_apex_norms


def profile_training(
    training: Training,
    place: Place,
    path: Path,
    copy: Path,
    *,
    sizes: Sequence[int] | None = None,
    degrees: Sequence[int] | None = None,
) -> None:
    """Measure the model's times and memory, and add them to the profile at `path`, which planning
    reads. The figures of this run alone are written to `copy`."""
    begin = time.monotonic()
    wanted = sorted(set(degrees or (1, training.tensor)))
    for degree in wanted:
        if degree < 1 or place.world % degree:
            raise ProgramError(f"the {place.world} ranks are not divisible by tensor {degree}")
    if training.context > 1:
        raise ProgramError("a profile needs whole sequences: set parallel.context to 1")
    model, samples = build_model(training), MadeUp(training)
    if training.precision == FP8:
        use_float8(model, place.device)
    plans = [plan_layers(model, replace(training, tensor=degree)) for degree in wanted]
    stages = parse_stage_map(place.stage_map, place.world, place.tensor)
    replicas = [held for t in range(place.tensor) for held in stages.slice(t).ranks]

    apex, _ = choose_apex(training, place.device)

    def read(size: int) -> Batch:
        return samples.read(TRAIN, range(size))

    def prepare(module: nn.Module) -> None:
        if apex:
            use_apex_norms(module)
        if training.compile:
            compile_blocks(module)

    def build_optimizer(held: list[nn.Parameter]) -> Any:
        return make_optimizer(nn.ParameterList(held), training, apex=apex)

    def say(line: str) -> None:
        shown = [f"profile {time.monotonic() - begin:6.1f} s | {part}" for part in line.split("\n")]
        print("\n".join(shown), flush=True)

    profiler = Profiler(
        model,
        place.device.type,
        local_rank=place.local_rank,
        precision=choose_base_precision(training.precision),
        tensor=wanted,
        tensor_plan=plans[-1],
        name=training.model,
        digest=name_shapes(training),
        groups=replicas,
        prepare=prepare,
        selective=not training.compile,
        seed=training.seed,
        say=say,
    )
    profiler.set_optimizer(build_optimizer)
    profiler.profile_all(read, sizes, path=path)
    if place.rank == 0:
        copy_file(path, copy)

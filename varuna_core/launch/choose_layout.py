"""The stages and micro-batches that the user left out, planned from a profile of the model.

The launcher deals out as many whole replicas as there are GPUs for, and each is told one share of
the batch: numbers of stages for which that does not come out even are not chosen.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from varuna_core.launch.errors import InputError
from varuna_core.planner.autoconfig import AutoConfig
from varuna_core.planner.profile.errors import PlanningError


class Choice(NamedTuple):
    """What was chosen, and what to tell of it."""

    stages: int
    chunk_size: int
    text: str


def choose_shape(
    profile: str, *, gpus: int, gpus_per_node: int, batch_size: int, stages: int | None = None
) -> Choice:
    """The fastest that the launcher can start; of so many `stages`, if they are given."""
    try:
        config = AutoConfig(gpus, gpus_per_node, batch_size, profile, verbose=False)
        config.get_min()  # says why where nothing fits
    except (PlanningError, OSError) as error:
        raise InputError(f"--profile {profile}: {error}") from None
    startable = [
        count
        for count, candidate in config.candidates.items()
        if stages in (None, count) and candidate.option.shape.replicas == gpus // count
    ]
    if not startable:
        words = "any number of" if stages is None else stages
        raise InputError(
            f"--profile {profile}: nothing that fits {gpus} GPUs has {words} stages in whole "
            f"replicas with equal shares of --batch_size {batch_size}; give --nstages and "
            "--chunk_size, or another batch"
        )
    best = min(startable, key=lambda count: config.batch_times[count])
    partition = "-".join(
        str(end - begin) for begin, end in pairwise(config.candidates[best].bounds)
    )
    return Choice(
        stages=best,
        chunk_size=config.micro_batch[best],
        text=(
            f"planned from {profile}: --nstages {best} --chunk_size {config.micro_batch[best]}, "
            f"{config.batch_times[best]:.4g} s a step with Varuna(partition={partition!r})"
        ),
    )

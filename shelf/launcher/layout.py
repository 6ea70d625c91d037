"""Layout of stages and replicas on a list of machines, from the launcher's flags. Pure.

Ranks are numbered machine by machine, and replica r owns ranks rP to rP+P-1, so that a pipeline
lies on one machine where it fits, and replicas of a stage are P ranks apart:

    2 machines x 3 GPUs, 2 stages       m0: r0s0 r0s1 r1s0    m1: r1s1 r2s0 r2s1
    2 machines x 4 GPUs, 3 stages       m0: r0s0 r0s1 r0s2 r1s0   m1: r1s1 r1s2 idle idle

Stages and micro-batches that the user left out are planned from a profile of the model. As many
whole replicas are dealt out as there are GPUs for, and each is given one share of the batch:
numbers of stages for which that does not come out even are not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from varuna_core.facts.partition import Partition
from vjob.jobs.errors import InputError


@dataclass(frozen=True, kw_only=True)
class MachineRanks:
    """Layout of a run on its machines."""

    machines: int
    """How many of the list have a rank; they are its first ones."""
    gpus_per_node: int
    stages: int
    replicas: int
    share: int
    """Samples of a batch for each replica."""
    chunk: int
    """Samples of a micro-batch."""
    idle_gpus: int
    idle_machines: int

    @property
    def world(self) -> int:
        return self.stages * self.replicas

    @property
    def nodes(self) -> tuple[tuple[int, int], ...]:
        """Machines and ranks on each: the full ones, then the one that is partly used."""
        full, rest = divmod(self.world, self.gpus_per_node)
        return tuple(
            item for item in ((full, self.gpus_per_node), (int(rest > 0), rest)) if item[0]
        )

    def describe(self) -> list[str]:
        """Lines for the user before the start."""
        stages, replicas = _count(self.stages, "stage"), _count(self.replicas, "replica")
        lines = [
            f"{stages} x {replicas} on {_count(self.machines, 'machine')}; a step is "
            f"{self.share} samples a replica in micro-batches of {self.chunk}"
        ]
        if self.idle_gpus:
            unused = f", {_count(self.idle_machines, 'machine')} of them whole" * bool(
                self.idle_machines
            )
            lines.append(
                f"{_count(self.idle_gpus, 'GPU')} idle{unused}: too few for one more replica of "
                f"{stages}"
            )
        return lines


def lay_out(
    *, machines: int, gpus_per_node: int, stages: int, batch_size: int, chunk_size: int
) -> MachineRanks:
    """Lay out as many replicas as fit; an InputError where none does, or the batch does not
    divide."""
    numbers = {
        "--gpus_per_node": gpus_per_node,
        "--nstages": stages,
        "--batch_size": batch_size,
        "--chunk_size": chunk_size,
    }
    for name, number in numbers.items():
        if number < 1:
            raise InputError(f"{name} {number}: want 1 or more")
    gpus = machines * gpus_per_node
    replicas = gpus // stages
    if replicas == 0:
        have = f"{_count(machines, 'machine')} x {gpus_per_node} is {_count(gpus, 'GPU')}"
        raise InputError(f"--nstages {stages} needs a GPU a stage, but {have}")
    unit = replicas * chunk_size
    rest = batch_size % unit
    if rest:
        near = [size for size in (batch_size - rest, batch_size - rest + unit) if size]
        raise InputError(
            f"--batch_size {batch_size} cannot be dealt out evenly: {gpus} GPUs hold "
            f"{_count(replicas, 'replica')} of {_count(stages, 'stage')}, and each is given one "
            f"share, of whole micro-batches of {chunk_size}; take "
            f"{' or '.join(map(str, near))}, or list other machines"
        )
    used = -(-stages * replicas // gpus_per_node)
    return MachineRanks(
        machines=used,
        gpus_per_node=gpus_per_node,
        stages=stages,
        replicas=replicas,
        share=batch_size // replicas,
        chunk=chunk_size,
        idle_gpus=gpus - stages * replicas,
        idle_machines=machines - used,
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


class PlannedShape(NamedTuple):
    """Stages, micro-batch and partition that were planned, and a message."""

    stages: int
    chunk_size: int
    partition: str | None
    text: str


def choose_shape(
    profile: str, *, gpus: int, gpus_per_node: int, batch_size: int, stages: int | None = None
) -> PlannedShape:
    """The fastest that the launcher can start; of so many `stages`, if they are given."""
    # The planner needs numpy, and time to load; no other launch does.
    try:
        from varuna_core.planner.autoconfig import AutoConfig
        from varuna_core.planner.profile.errors import PlanningError
    except ImportError as error:
        raise InputError(f"--profile: planning needs {error.name}, which is not here") from None

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
    bounds = config.candidates[best].bounds
    partition = Partition([end - begin for begin, end in pairwise(bounds)]).spell()
    return PlannedShape(
        stages=best,
        chunk_size=config.micro_batch[best],
        partition=partition,
        text=(
            f"planned from {profile}: --nstages {best} --chunk_size {config.micro_batch[best]}, "
            f"partition {partition}, {config.batch_times[best]:.4g} s a step"
        ),
    )

"""How stages and replicas lie on the machines. Pure.

Ranks are numbered machine by machine, and replica r owns ranks rP to rP+P-1, so that a pipeline
lies on one machine where it fits, and replicas of a stage are P ranks apart:

    2 machines x 3 GPUs, 2 stages       m0: r0s0 r0s1 r1s0    m1: r1s1 r2s0 r2s1
    2 machines x 4 GPUs, 3 stages       m0: r0s0 r0s1 r0s2 r1s0   m1: r1s1 r1s2 idle idle
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.launch.errors import InputError
from varuna_core.records.stage_map import build_stages, encode_stage_map


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who runs what."""

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
    def stage_map(self) -> str:
        return encode_stage_map(build_stages(self.stages, self.replicas, "pipeline"))

    @property
    def nodes(self) -> tuple[tuple[int, int], ...]:
        """Machines and ranks on each: the full ones, then the one that is partly used."""
        full, rest = divmod(self.world, self.gpus_per_node)
        return tuple(
            item for item in ((full, self.gpus_per_node), (int(rest > 0), rest)) if item[0]
        )

    def describe(self) -> list[str]:
        """What the user should know before the start."""
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
) -> Layout:
    """As many replicas as fit; an InputError where none does or the batch cannot be dealt out."""
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
    share, rest = divmod(batch_size, replicas)
    if rest:
        near = [size for size in (batch_size - rest, batch_size - rest + replicas) if size]
        raise InputError(
            f"--batch_size {batch_size} cannot be dealt out evenly: {gpus} GPUs hold {replicas} "
            f"replicas of {_count(stages, 'stage')}, and each is told one share; take "
            f"{' or '.join(map(str, near))}, or list other machines"
        )
    used = -(-stages * replicas // gpus_per_node)
    return Layout(
        machines=used,
        gpus_per_node=gpus_per_node,
        stages=stages,
        replicas=replicas,
        share=share,
        chunk=chunk_size,
        idle_gpus=gpus - stages * replicas,
        idle_machines=machines - used,
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

"""Where a try runs: one node of a queue, or this machine; and where it may save.

--queue NAME                 a node of that queue, by the usual submit
--here, or no Slurm          this machine, by the local scheduler
else                         a node of the first group's own queue
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from varuna_core.agent.gpu.accelerator import choose_accelerator, count_visible
from varuna_core.facts.known import Value
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.errors import InputError
from vjob.jobs.planning.question import find_nodes
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.submit.snapshot import find_here
from vjob.shelf.trial.result import Finding
from vjob.shelf.trial.smaller import OneNode

MARK = ".vjob-try-"


def choose_node(conf: JobConf, queue: str | None, *, is_here: bool) -> OneNode:
    """The node that a try of this conf gets; InputError where there is none."""
    first = conf.cluster.nodes[0]
    wants_gpus = any(group.num_gpus for group in conf.cluster.nodes)
    has_slurm = schedulers.choose_auto().can.has_queue
    if queue is not None and not has_slurm:
        raise InputError(
            f"--queue {queue}: sbatch is not on PATH; leave --queue out to try it on this machine"
        )
    own = schedulers.choose_for(conf.cluster)
    is_queued = own.can.has_queue and not own.find_obstacle()
    if is_here or (queue is None and not is_queued):
        counted = count_visible(choose_accelerator(), os.environ)
        count = counted.value if wants_gpus and isinstance(counted, Value) else 0
        kind = f"{first.gpu_type}:" if first.gpu_type else ""
        return OneNode(num_gpus=count, gpus=f"{kind}{count}" if count else None, is_here=True)
    if queue is None or queue == first.queue or not wants_gpus:
        return OneNode(
            num_gpus=first.num_gpus,
            gpus=first.gpus,
            queue=queue or first.queue,
            is_here=False,
            is_asked=queue is not None,
        )
    return _choose_in_queue(first, queue)


def _choose_in_queue(first: NodeGroup, queue: str) -> OneNode:
    """GPUs of the kind that the conf has, where the queue has such; else of the most."""
    try:
        groups = find_nodes(queue)
    except InputError:  # none with GPUs
        return OneNode(num_gpus=0, gpus=None, queue=queue, is_here=False, is_asked=True)
    alike = [group for group in groups if first.gpu_type in (None, group.gpu_type)]
    best = max(alike or groups, key=lambda group: group.num_gpus)
    if best.num_gpus >= first.num_gpus and alike:
        return OneNode(
            num_gpus=first.num_gpus, gpus=first.gpus, queue=queue, is_here=False, is_asked=True
        )
    return OneNode(
        num_gpus=best.num_gpus, gpus=best.gpus, queue=queue, is_here=False, is_asked=True
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """The folder of the try inside the conf's own."""

    asked: str
    """The conf's."""
    seen: str
    """The try's, as ranks see it."""
    here: Path | None
    """The try's, as this machine sees it; None where it does not."""
    made: tuple[Path, ...] = ()
    """Folders that were not there before, the innermost first."""
    problem: Finding | None = None

    def remove(self) -> None:
        """Remove it with all checkpoints, and the folders above it that the try made."""
        if self.here is not None:
            shutil.rmtree(self.here, ignore_errors=True)
        for path in self.made[1:]:
            with contextlib.suppress(OSError):  # not empty: somebody else has begun to use it
                path.rmdir()


def make_checkpoints(conf: JobConf, base: Path) -> CheckpointFolder | None:
    """Make a folder for the checkpoints of a try; None where the conf has none."""
    asked = conf.train.checkpoint.folder
    if asked is None:
        return None
    name = f"{MARK}{uuid.uuid4().hex[:8]}"
    here = find_here(asked, conf, base)
    own = None if here is None else here / name
    made: tuple[Path, ...] = ()
    problem = None
    if own is not None:
        made = tuple(path for path in (own, *own.parents) if not os.path.lexists(path))
        try:
            own.mkdir(parents=True)
            (own / "probe").write_bytes(b"x")
            (own / "probe").unlink()
        except OSError as error:
            problem = Finding(
                what="checkpoint",
                cause=f"train.checkpoint.folder {asked} cannot be written: {error.strerror}",
                remedy="name a folder on the shared file system that you may write",
            )
    seen = f"{asked}/{name}"
    return CheckpointFolder(asked=asked, seen=seen, here=own, made=made, problem=problem)

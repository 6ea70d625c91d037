"""Groups of one case, where a process runs many.

Each has threads that wake a hundred times a second: those of a few hundred groups take all that the
processors have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def leave_groups() -> Iterator[None]:
    """At its end, on all ranks, every group that was made since is over.

    Those of a mesh stay: torch keeps them by their names for the next mesh of the same shape.
    """
    if not dist.is_initialized():
        yield
        return
    kept = set(dist.distributed_c10d._world.pg_map)
    make_mesh = DeviceMesh.from_group

    def remember(group: Any, *args: Any, **kwargs: Any) -> DeviceMesh:
        kept.add(group)
        return make_mesh(group, *args, **kwargs)

    with patch.object(DeviceMesh, "from_group", staticmethod(remember)):
        yield
    dist.barrier()
    for group in [one for one in dist.distributed_c10d._world.pg_map if one not in kept]:
        dist.destroy_process_group(group)

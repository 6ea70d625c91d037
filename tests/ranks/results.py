"""Results of the ranks of a test, which each leaves as JSON in a folder of theirs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks.start import collect, start_ranks


def leave_results(main: Callable[[Path, int], dict[str, Any]]) -> None:
    """Run `main(folder, rank)` in a process group of the ranks, and leave what it returns.

    The program's arguments are the folder, the rank and the number of ranks.
    """
    import torch.distributed as dist

    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = main(folder, rank)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def collect_results(module: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """Start the ranks of a module that calls `leave_results`; the results of each."""
    with start_ranks(module, world, str(folder)) as ranks:
        done = collect(ranks)
    assert not any(code for code, _ in done), "\n".join(out[-3000:] for _, out in done)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]

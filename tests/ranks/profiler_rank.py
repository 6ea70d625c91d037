"""One rank of profiles: `profiler_rank.py <folder> <rank> <world size>`; a JSON file comes back."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.models.profiled import Stack, is_real, make_batch
from tests.ranks.start import DEADLINE_S
from varuna_core import Profiler
from varuna_core.programs import gpt

SIZES = {"layers": 3, "hidden": 16, "heads": 2, "sequence": 8, "vocab": 33}


def read_tokens(size: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(size, SIZES["sequence"] + 1, dtype=torch.int64)}


def share_layers(folder: Path, rank: int) -> dict[str, Any]:
    """Alone and with two ranks a layer; the links are timed."""
    profiler = Profiler(gpt.Gpt(**SIZES, dropout=0.0), "cpu", tensor=(1, 2), name="gpt", samples=1)
    profile = profiler.profile_all(read_tokens, [1, 2], folder)
    return {"cells": [list(key) for key in profile.gpus["cpu"].cells]}


def run_out_on_one(folder: Path, rank: int) -> dict[str, Any]:
    """Two ranks share layers; one of them runs out of memory, the other waits for it."""
    model = gpt.Gpt(**SIZES, dropout=0.0)

    def limit(module: Any, args: Any) -> None:
        if rank == 1 and is_real(args[0]) and len(args[0]) > 1:
            raise torch.OutOfMemoryError("of this rank alone")

    model.blocks[1].register_forward_pre_hook(limit)
    profiler = Profiler(model, "cpu", tensor=2, name="limited", samples=3)
    profile = profiler.profile_all(read_tokens, [1, 2, 4], folder, links=False)
    return {
        "cells": [list(key) for key in profile.gpus["cpu"].cells],
        "stopped": [detail.stopped for detail in profiler.details],
    }


def mix_kinds(folder: Path, rank: int) -> dict[str, Any]:
    """Two kinds of GPU on two nodes, one of which holds less."""
    os.environ["VJOB_NODE"] = f"n{rank}"
    kind, limit = ("small", 2) if rank else ("large", 1000)
    model = Stack(limit=limit)
    profiler = Profiler(model, "cpu", kind=kind, name="mixed", samples=5, groups=[[0, 1]])
    profile = profiler.profile_all(make_batch, [1, 2, 4, 8], folder)
    return {
        "cells": {k: [list(key) for key in gpu.cells] for k, gpu in profile.gpus.items()},
        "links": [list(key) for key in profile.network.links],
        "sums": [list(key) for key in profile.network.all_reduces],
        "largest": max(size for _, size in model.runs),
    }


def share_out(folder: Path, rank: int) -> dict[str, Any]:
    """Two equal ranks, each of which measures some of the segments."""
    model = Stack()
    profiler = Profiler(model, "cpu", name="dealt", samples=5)
    profiler.profile_all(make_batch, [1], folder, links=False)
    return {"run": sorted({number for number, _ in model.runs})}


def fail_on_one(folder: Path, rank: int) -> dict[str, Any]:
    """An error on one rank ends both."""

    def read(size: int) -> dict[str, torch.Tensor]:
        if rank == 1 and size == 2:
            raise KeyError("no such batch")
        return make_batch(size)

    try:
        Profiler(Stack(), "cpu", name="failing").profile_all(read, [1, 2], folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


CASES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "shared": share_layers,
    "limited": run_out_on_one,
    "mixed": mix_kinds,
    "dealt": share_out,
    "failing": fail_on_one,
}


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = {}
    for name, run in CASES.items():
        print(name, flush=True)
        found[name] = run(folder, rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

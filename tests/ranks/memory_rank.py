"""One rank of trainings that lay copies in memory: `memory_rank.py <folder> <rank> <world size>`.

The folder holds cases.json; of each case and rank what it found comes back. A case trains in one
layout, saves and lays the same step, loses nodes, and takes that step up in another layout: once
from the checkpoint and once from the copy, which are to be equal.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import random
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import precision_rank, save_rank, tensor_rank, train_rank
from tests.ranks.groups import leave_groups
from tests.ranks.save_rank import BATCH, KINDS, make_batch, open_varuna
from tests.ranks.start import DEADLINE_S
from varuna_core import Varuna
from varuna_core.records.memory_copies import list_copies, list_shares

STEPS = 3
SHARED = "shared"
"""The kind of training whose layers several ranks share."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """From one layout to another."""

    name: str
    kind: str
    source: dict[str, Any]
    target: dict[str, Any]
    neighbours: int = 1
    """Ranks on a node."""
    lost: tuple[int, ...] = ()
    """Nodes that are other ones afterwards."""
    damage: str = ""
    """To the copy on every node: "flip" a byte of each file, "cut" each, "no marker"."""


def find_home(folder: Path, case: Case, rank: int) -> Path:
    home = folder / "homes" / case.name / f"node{rank // case.neighbours}"
    home.mkdir(parents=True, exist_ok=True)
    return home


def build_shared(layout: dict[str, Any]) -> tensor_rank.Case:
    batches = [BATCH] * STEPS
    return tensor_rank.Case(name=SHARED, optimizer="adamw", batches=batches, **layout)


def open_one(case: Case, layout: dict[str, Any], home: Path, attempt: int) -> tuple[Varuna, Any]:
    if case.kind == SHARED:
        of_tensor = build_shared(layout)
        model = tensor_rank.build_model(of_tensor, seed=attempt)
        varuna = tensor_rank.open_varuna(of_tensor, model)
        optimizer = tensor_rank.build_optimizer(of_tensor, varuna.parameters())
    else:
        of_save = save_rank.Case(name=case.name, kind=case.kind, store="", **layout)
        varuna = open_varuna(of_save, seed=attempt)
        named = dict(varuna.named_parameters())
        optimizer = precision_rank.build_optimizer(KINDS[case.kind].optimizer, named)
    varuna.set_optimizer(optimizer)
    assert not varuna.keep_in_memory(home if dist.get_rank() else None, attempt, case.neighbours)
    assert varuna.keep_in_memory(home, attempt, case.neighbours)
    return varuna, optimizer


def train(case: Case, store: Path, home: Path) -> list[str]:
    """Lays a copy after each step; saves after the last one, too."""
    varuna, optimizer = open_one(case, case.source, home, 0)
    for step in range(STEPS):
        varuna.settle_copy()
        held = range(varuna.samples.start, varuna.samples.stop)
        if case.kind == SHARED:
            whole = tensor_rank.make_batch(build_shared(case.source), step)
        else:
            whole = make_batch(KINDS[case.kind], step)
        varuna.step(train_rank.cut_batch(whole, BATCH, held))
        optimizer.step()
        varuna.zero_grad()
        varuna.data_position, varuna.user_state = step * BATCH, {"at": (step,)}
        varuna.lay_copy()
    varuna.checkpoint(store, on_demand=True)
    varuna.settle_copy()
    dist.barrier()
    varuna.close()
    return list_copies(home)


def lose(case: Case, home: Path, copy: str) -> None:
    """By one rank of the node."""
    if int(home.name[4:]) in case.lost:
        shutil.rmtree(home)
        home.mkdir()
    if case.damage == "no marker":
        for path in (home / copy / "markers").glob("*"):
            path.unlink()
    elif case.damage:
        for path in (home / copy).glob("segment-*"):
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data[: -5 if case.damage == "cut" else None])


def take(varuna: Varuna, optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "state": precision_rank.take_state(varuna),
            "buffers": dict(varuna.named_buffers()),
            "optimizer": optimizer.state_dict(),
            "progress": (varuna.iteration, varuna.data_position, varuna.user_state),
            "scale": varuna.updates.scale,
        }
    )


def run_case(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    store, home = folder / "stores" / case.name, find_home(folder, case, rank)
    copies = train(case, store, home)
    newest = copies[-1]
    shares = list_shares(home, newest)
    dist.barrier()
    if rank % case.neighbours == 0:
        lose(case, home, newest)
    dist.barrier()
    varuna, optimizer = open_one(case, case.target, home, 1)
    assert varuna.load_checkpoint(store) == STEPS
    saved, saved_random = take(varuna, optimizer), (random.random(), torch.rand(1))
    with torch.no_grad():
        for parameter in varuna.parameters():
            parameter.add_(1)
    varuna.iteration, varuna.data_position, varuna.user_state = 0, None, None
    found = varuna.load_copy(newest)
    result = {
        "copies": copies,
        "shares": [share.count for share in shares],
        "found": found,
        "saved": saved,
        "loaded": take(varuna, optimizer),
        "random": (saved_random, (random.random(), torch.rand(1))),
        "left": list_copies(home),
    }
    dist.barrier()
    varuna.close()
    return result


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        with leave_groups():
            result = run_case(case, folder, rank)
        torch.save(result, folder / f"{case.name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def write_cases(folder: Path, cases: list[Case]) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main()

"""One rank of trainings that end in a gathered state dict: `gather_rank.py <folder> <rank> <size>`.

The folder holds cases.json; a file a case comes back from rank 0, and what went wrong on each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.models import small as models
from tests.ranks.groups import leave_groups
from tests.ranks.start import DEADLINE_S
from tests.ranks.train_rank import MOMENTUM, RATE, SEED, cut_batch
from varuna_core import Varuna
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.programs.gpt import Gpt

BATCH, STEPS = 8, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to train, and in which layout."""

    name: str
    stage_map: str
    model: str = "TiedGpt"
    precision: str = "fp32"
    tensor: int = 1
    zero: int = 0
    offload: str | None = None
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    dies: bool = False
    """The last rank does, in the middle; this ends the process of all."""


def build_model(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if case.model == "built-in":
        return Gpt(layers=3, hidden=16, heads=2, sequence=8, vocab=33, dropout=0.0)
    model: nn.Module = getattr(models, case.model)()
    return model


def make_batch(case: Case, step: int) -> dict[str, Any]:
    if case.model == "built-in":
        draw = torch.Generator().manual_seed(step)
        return {"tokens": torch.randint(0, 33, (BATCH, 9), generator=draw)}
    if case.model == "ConvNet":
        return models.make_images(BATCH)
    return models.make_inputs(BATCH, seed=step)


def open_varuna(case: Case) -> Varuna:
    return Varuna(
        build_model(case),
        case.stage_map,
        make_batch(case, 0),
        BATCH,
        2,
        device="cpu",
        precision=case.precision,
        tensor=case.tensor,
        zero=case.zero,
        offload=case.offload,
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        seed=SEED,
    )


def train(case: Case, folder: Path, rank: int) -> None:
    varuna = open_varuna(case)
    optimizer = torch.optim.SGD(varuna.parameters(), lr=RATE, momentum=MOMENTUM)
    varuna.set_optimizer(optimizer)
    for step in range(STEPS):
        if step == 1:  # between steps, with gradients that are there: they stay
            varuna.gather_state_dict()
        varuna.step(cut_batch(make_batch(case, step), BATCH, varuna.samples))
        optimizer.step()
        varuna.zero_grad()
    found = varuna.gather_state_dict()
    assert (found is None) == (rank != 0)
    varuna.gather_state_dict(folder / f"{case.name}.file.safetensors")
    varuna.gather_state_dict(str(folder / f"{case.name}.file.pt"))
    varuna.checkpoint(folder / "stores" / case.name, on_demand=True)
    if found is not None:
        torch.save(found, folder / f"{case.name}.pt")
    said = fail(varuna, folder, rank)
    (folder / f"{case.name}.{rank}.json").write_text(json.dumps(said))
    again = varuna.gather_state_dict()
    assert again is None or all(torch.equal(again[n], found[n]) for n in again)  # type: ignore[index]
    varuna.close()


def fail(varuna: Varuna, folder: Path, rank: int) -> list[str]:
    """What each rank hears of a wrong name, a folder that is not there, a last rank that fails."""
    said = []

    def attempt(file: Path | None) -> None:
        try:
            varuna.gather_state_dict(file)
            said.append("nothing")
        except CheckpointError as error:
            said.append(str(error))

    attempt(folder / "model.txt")
    attempt(folder / "nowhere" / "model.safetensors")
    if rank == dist.get_world_size() - 1:
        take = varuna.saving._take_model

        def fail_in_the_middle() -> Any:
            held = take()

            def burn() -> Any:
                raise MemoryError("no room for this piece")

            if not held:  # another replica gives all
                burn()
            return [*held[:-1], held[-1]._replace(load=burn)]

        varuna.saving._take_model = fail_in_the_middle  # type: ignore[method-assign]
        attempt(None)
        varuna.saving._take_model = take  # type: ignore[method-assign]
    else:
        attempt(None)
    return said


def lose_the_last(case: Case, rank: int) -> None:
    varuna = open_varuna(case)
    if rank == dist.get_world_size() - 1:
        take = varuna.saving._take_model

        def die_in_the_middle() -> Any:
            held = take()
            return [*held[:-1], held[-1]._replace(load=lambda: os._exit(3))]

        varuna.saving._take_model = die_in_the_middle  # type: ignore[method-assign]
    varuna.gather_state_dict()


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        if case.dies:
            lose_the_last(case, rank)
            return
        with leave_groups():
            train(case, folder, rank)
    dist.barrier()
    dist.destroy_process_group()


def write_cases(folder: Path, cases: list[Case]) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main()

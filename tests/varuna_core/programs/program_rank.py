"""One rank of built-in programs, for tests: `program_rank <folder> <rank> <world size>`.

The folder holds cases.json, a list of trainings; a file a case and rank comes back.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks.device import choose_device
from tests.ranks.start import DEADLINE_S
from varuna_core.programs.batches import TRAIN, Batch
from varuna_core.programs.place import Place, leave
from varuna_core.programs.training import Trainer
from varuna_core.records.training import Training, parse_training


@dataclass(kw_only=True)
class Case:
    """What is trained where."""

    name: str
    stage_map: str
    training: Training
    stop_after: int | None = None
    """A step after which the run is left as it is: its last checkpoint is what there is."""


@dataclass(kw_only=True)
class Result:
    """What one rank saw."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluated: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    read: dict[int, list[list[int]]] = field(default_factory=dict)
    """The samples that each step was trained on, as tokens."""
    stage: int = 0
    replica: int = 0


class Stopped(Exception):
    """Leaves the loop in the middle."""


class Watched(Trainer):
    """Notes what the tests ask for."""

    def watch(self, result: Result, stop_after: int | None) -> None:
        self.result, self.stop_after = result, stop_after
        self.ahead: dict[int, list[list[int]]] = {}
        result.stage, result.replica = self.model.place, self.model.replica
        note, tell = self.lines.note, self.lines.tell_validation

        def note_too(step: int, loss: Tensor, overflow: bool, rate: float) -> None:
            result.losses[step], result.rates[step] = loss.item(), rate
            result.read[step] = self.ahead.pop(step - 1)
            note(step, loss, overflow, rate)

        def tell_too(step: int, loss: Tensor) -> None:
            result.evaluated[step] = loss.item()
            tell(step, loss)

        self.lines.note, self.lines.tell_validation = note_too, tell_too  # type: ignore[method-assign]

    def _read(self, part: str, number: int) -> Batch:
        if part == TRAIN and self.stop_after is not None and number >= self.stop_after:
            raise Stopped
        batch = super()._read(part, number)
        if part == TRAIN:
            self.ahead[number] = next(iter(batch.values())).tolist()
        return batch


def train(case: Case, rank: int, world: int) -> Result:
    place = Place(
        rank=rank,
        world=world,
        local_rank=rank,
        stage_map=case.stage_map,
        tensor=case.training.tensor,
        device=choose_device(),
    )
    trainer = Watched(case.training, place, None)
    result = Result()
    trainer.watch(result, case.stop_after)
    try:
        trainer.run()
    except Stopped:
        assert case.stop_after is not None
    trainer.close()
    return result


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for value in json.loads((folder / "cases.json").read_text()):
        training = parse_training(value.pop("training"), "cases.json")
        result = train(Case(training=training, **value), rank, world)
        (folder / f"{value['name']}.{rank}.json").write_text(json.dumps(asdict(result)))
    leave()


def write_cases(folder: Path, cases: Sequence[Case]) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


def read_results(folder: Path, name: str, world: int) -> list[Result]:
    def number(values: dict[str, Any]) -> dict[int, Any]:
        return {int(key): value for key, value in values.items()}

    found = []
    for rank in range(world):
        value: dict[str, Any] = json.loads((folder / f"{name}.{rank}.json").read_text())
        for key in ("losses", "evaluated", "rates", "read"):
            value[key] = number(value[key])
        found.append(Result(**value))
    return found


if __name__ == "__main__":
    main()

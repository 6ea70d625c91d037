"""One rank of trainings that save and load, for tests: `save_rank.py <folder> <rank> <world size>`.

The folder holds cases.json; a file a case and rank comes back. A case saves before its step 3 of 5,
or loads what another saved there and takes the rest of the steps.
"""

from __future__ import annotations

import faulthandler
import json
import random
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.models import small as models
from tests.ranks import precision_rank, train_rank
from tests.ranks.device import choose_device
from tests.ranks.groups import leave_groups
from tests.ranks.start import DEADLINE_S
from varuna_core import Varuna
from varuna_core.checkpoint.format.errors import CheckpointError

SAVED, STEPS, BATCH = 3, 5, 8


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A training."""

    model: str
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    clip: float | None = None
    saving: dict[str, Any] = field(default_factory=dict)
    scaling: dict[str, Any] = field(default_factory=dict)
    """Of the training that saves; one that loads begins with another scale."""


KINDS = {
    "groups": Kind(model="Gpt", optimizer="groups", options={"dropout": 0.2}),
    "half": Kind(
        model="TiedGpt",
        optimizer="sgd",
        precision="fp16",
        clip=0.3,
        saving={"shard": True},
        scaling={"init_loss_scale": 2.0**17},
    ),
    "norm": Kind(
        model="ConvNet", optimizer="sgd", saving={"shard": True, "beside": True, "keep": 1}
    ),
}


@dataclass(kw_only=True)
class Case:
    """What one training does, in which layout."""

    name: str
    kind: str
    stage_map: str
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero: int = 0
    offload: str | None = None
    store: str
    load: bool = False
    order: str = "last"
    """When it loads: before the optimizer and the schedule are told of ("first"), or after."""

    outputs: bool = False
    """Not a training: give back what models return."""


def build_model(kind: Kind, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = getattr(models, kind.model)(**kind.options)
    return model


def make_batch(kind: Kind, step: int) -> dict[str, Any]:
    if kind.model == "ConvNet":
        return models.make_images(BATCH)
    return models.make_inputs(BATCH, seed=step)


def open_varuna(case: Case, seed: int) -> Varuna:
    kind = KINDS[case.kind]
    return Varuna(
        build_model(kind, seed),
        case.stage_map,
        make_batch(kind, 0),
        BATCH,
        2,
        device=choose_device(),
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        precision=kind.precision,
        seed=seed,
        zero=case.zero,
        offload=case.offload,
    )


def train(case: Case, folder: Path) -> dict[str, Any]:
    kind, store = KINDS[case.kind], folder / "stores" / case.store
    varuna = open_varuna(case, seed=5 if case.load else 0)
    if case.load and case.order == "first":
        assert varuna.load_checkpoint(store) == SAVED * 10
    optimizer = precision_rank.build_optimizer(kind.optimizer, dict(varuna.named_parameters()))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    varuna.set_optimizer(optimizer, **({} if case.load else kind.scaling))
    varuna.set_scheduler(scheduler)
    if case.load and case.order == "last":
        assert varuna.load_checkpoint(store) == SAVED * 10
    if not case.load:
        random.seed(3)
        varuna.user_state = {"best": (1.5, float("inf")), "at": {7: b"x"}}
    result: dict[str, Any] = {"losses": [], "scales": [], "rates": [], "first": varuna.iteration}
    for step in range(varuna.iteration, STEPS):
        if step == SAVED:
            result["buffers"] = {name: b.clone() for name, b in varuna.named_buffers()}
        if step == SAVED and not case.load:
            options = dict(kind.saving)
            if options.pop("beside", False):
                options["tempdir"] = folder / f"local{varuna.place}"
                varuna.checkpoint(store, 1, **options)
            varuna.data_position = step * BATCH
            pending = varuna.checkpoint(store, SAVED * 10, **options)
            assert (pending is None) == ("tempdir" not in options)
        result["scales"].append(varuna.updates.scale)
        held = range(varuna.samples.start, varuna.samples.stop)
        batch = train_rank.cut_batch(make_batch(kind, step), BATCH, held)
        loss, overflow = varuna.step(batch, kind.clip)
        result["losses"].append(loss)
        optimizer.step()
        if not overflow:
            scheduler.step()
        varuna.zero_grad()
        result["rates"].append([group["lr"] for group in optimizer.param_groups])
        if step == SAVED:
            result["drawn"] = (random.random(), torch.rand(()).item())
    held = precision_rank.take_state(varuna)
    result["state"] = {name: tensor.clone() for name, tensor in held.items()}
    result["replica"] = varuna.replica
    result["user"] = (varuna.user_state, varuna.data_position)
    varuna.close()
    return result


def collect_outputs(case: Case) -> dict[str, Any]:
    """A model that returns no loss, one that returns a dict with it; batches of other sizes."""
    varuna = open_varuna(case, seed=0)
    varuna.eval()
    size = 5 + varuna.replica
    only = {"ids": models.make_inputs(size, seed=varuna.replica)["ids"]}
    result = {
        "replica": varuna.replica,
        "logits": varuna.evaluate(only, outputs=True),
        "last": varuna.evaluate(only, outputs="last"),
        "holds_last": varuna.engine.last is not None,
        "loss": varuna.evaluate(models.make_inputs(24)),
    }
    varuna.close()
    torch.manual_seed(0)
    varuna = Varuna(
        models.Bert(),
        case.stage_map,
        {**models.make_bert_inputs(BATCH), "return_dict": True},
        BATCH,
        2,
        device=choose_device(),
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
    )
    result["dict"] = varuna.evaluate(
        {**models.make_bert_inputs(7), "return_dict": True}, outputs=True
    )
    varuna.close()
    return result


def fail_to_load(case: Case, folder: Path) -> dict[str, str]:
    """Each folder of bad ones, and what its load says."""
    said = {}
    varuna = open_varuna(case, seed=0)
    named = dict(varuna.named_parameters())
    varuna.set_optimizer(precision_rank.build_optimizer("groups", named))
    bad = sorted((folder / "bad").iterdir())
    asked = {f"{store.name} by name": (store, SAVED * 10) for store in bad}
    for name, words in {**asked, **{store.name: (store,) for store in bad}}.items():
        try:
            said[name] = f"loaded {varuna.load_checkpoint(*words)}"
        except CheckpointError as error:
            said[name] = f"{type(error).__name__}: {error}"
    assert varuna.load_checkpoint(folder / "stores" / case.store) == SAVED * 10
    varuna.close()
    return said


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    if case.outputs:
        return collect_outputs(case)
    return fail_to_load(case, folder) if case.order == "bad" else train(case, folder)


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    text = (folder / "cases.json").read_text()
    store = dist.FileStore(str(folder / f"store{hash_text(text)}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for fields in json.loads(text):
        case = Case(**fields)
        with leave_groups():
            result = run_case(case, folder)
        torch.save(result, folder / f"{case.name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def hash_text(text: str) -> str:
    return str(sum(text.encode()))


def write_cases(folder: Path, cases: list[Case]) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main()

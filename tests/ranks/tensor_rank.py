"""One rank of trainings whose layers are shared: `tensor_rank.py <folder> <rank> <world size>`.

The folder holds cases.json, a list of what to train; a file a case and rank comes back. A case
with a store saves there before its last two steps, or goes on from what another saved.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import small as models
from tests.models import tensor as tensor_models
from tests.ranks.start import DEADLINE_S
from tests.ranks.train_rank import MOMENTUM, RATE, SEED, cut_batch
from varuna_core import Varuna
from varuna_core.programs import bert, gpt

LAYERS, HIDDEN, HEADS, LENGTH = 4, 16, 4, 8
VOCAB = 33
"""Not to be divided by two."""

AFTER = 2
"""Steps after a save."""


@dataclass(kw_only=True)
class Case:
    """What to train, and in which layout."""

    name: str
    stage_map: str
    tensor: int = 2
    model: str = "gpt"
    sequence_parallel: bool = False
    dropout: float = 0.0
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    partition: str | None = None
    precision: str = "fp32"
    recompute: str = "none"
    memory_limit: float | None = None
    zero: int = 0
    batches: list[int] = field(default_factory=lambda: [8, 4])
    clip: float | None = None
    optimizer: str = "sgd"
    on_meta: bool = False
    store: str | None = None
    load: bool = False
    shard: bool = False
    fails: bool = False


def build_model(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "sequence": LENGTH, "vocab": VOCAB}
    if case.model == "gpt":
        return gpt.Gpt(**sizes, dropout=case.dropout)
    if case.model == "bert":
        return bert.Bert(**sizes, dropout=case.dropout)
    made: nn.Module = getattr(tensor_models, case.model)(dropout=case.dropout)
    return made


def make_batch(case: Case, step: int) -> dict[str, Any]:
    size = case.batches[step]
    draw = torch.Generator().manual_seed(step)
    if case.model == "gpt":
        return {"tokens": torch.randint(0, VOCAB, (size, LENGTH + 1), generator=draw)}
    if case.model == "bert":
        text = torch.randint(0, VOCAB, (size, LENGTH), generator=draw)
        mask = torch.ones_like(text)
        mask[:, -1] = 0
        return {
            "text": text,
            "types": (text > VOCAB // 2).long(),
            "labels": text.roll(1, 1).masked_fill(text % 3 > torch.arange(size)[:, None] % 3, -1),
            "padding_mask": mask,
            "is_random": text[:, 0] % 2,
        }
    if case.model == "Padded":
        return models.make_padded_inputs(size, LENGTH, seed=step)
    return models.make_inputs(size, LENGTH, seed=step)


def build_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def open_varuna(case: Case, model: nn.Module) -> Varuna:
    plan = None
    if case.sequence_parallel:
        assert isinstance(model, gpt.Gpt)
        plan = model.tensor_parallel_plan(sequence_parallel=True)
    return Varuna(
        model,
        case.stage_map,
        make_batch(case, 0),
        max(case.batches),
        2,
        device="cpu",
        partition=case.partition,
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        precision=case.precision,
        recompute=case.recompute,  # type: ignore[arg-type]  # text from a file
        memory_limit=case.memory_limit,
        tensor=case.tensor,
        tensor_plan=plan,
        zero=case.zero,
        seed=SEED,
    )


def take(varuna: Varuna, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Each with where it lies in the whole tensor: None, or (offset, extent, offset here)."""
    taken: dict[str, Any] = {}
    for name, tensor in tensors.items():
        share = None if varuna.sharding is None else varuna.sharding.shares.find(name)
        pieces = share and [(o.offset, o.extent, i.offset) for o, i in share.pieces]
        taken[name] = tensor.clone(), pieces
    return taken


def train(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    model = build_model(case, seed=rank + 5 if case.load else 0)
    with torch.no_grad():  # ranks that start from other weights are put right
        for parameter in model.parameters():
            parameter.add_(rank % case.tensor)
    varuna = open_varuna(case, model)
    optimizer = build_optimizer(case, varuna.parameters())
    varuna.set_optimizer(optimizer, loss_scale=1024.0)
    store = folder / "stores" / (case.store or "")
    if case.load:
        varuna.load_checkpoint(store)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}, "first": varuna.iteration}
    for step in range(varuna.iteration, len(case.batches)):
        if case.store and not case.load and step == len(case.batches) - AFTER:
            varuna.checkpoint(store, shard=case.shard)
        size = case.batches[step]
        held = range(min(varuna.samples.start, size), min(varuna.samples.stop, size))
        loss, _ = varuna.step(cut_batch(make_batch(case, step), size, held), case.clip)
        result["losses"].append(loss)
        result["norms"].append(varuna.last_grad_norm)
        if step == 0:
            named = varuna.masters()
            result["gradients"] = take(
                varuna, {n: p.grad for n, p in named.items() if p.grad is not None}
            )
        optimizer.step()
        varuna.zero_grad()
    varuna.eval()
    if not case.store:
        size = case.batches[0]
        held = range(min(varuna.samples.start, size), min(varuna.samples.stop, size))
        result["evaluated"] = varuna.evaluate(cut_batch(make_batch(case, 0), size, held))
    if case.model in ("Apart", "Words"):
        result["logits"] = varuna.evaluate({"ids": make_batch(case, 0)["ids"]}, outputs=True)
    result["state"] = take(varuna, varuna.state_dict())
    result["at"] = varuna.place, varuna.replica
    varuna.close()
    return result


def run(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    if not case.fails:
        return train(case, folder, rank)
    try:
        train(case, folder, rank)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    text = (folder / "cases.json").read_text()
    store = dist.FileStore(str(folder / f"store{sum(text.encode())}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for fields in json.loads(text):
        case = Case(**fields)
        torch.save(run(case, folder, rank), folder / f"{case.name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def write_cases(folder: Path, cases: list[Case]) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main()

"""One rank of a run in some precision, for tests: `precision_rank.py <folder> <rank> <world size>`.

As train_rank.py; what it gives back is of the masters.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import small as models
from tests.ranks import train_rank
from tests.ranks.device import CPU, choose_device
from tests.ranks.groups import leave_groups
from tests.ranks.start import DEADLINE_S
from varuna_core import Varuna
from varuna_core.runtime.engine import weight_grads
from varuna_core.runtime.optim import grads
from varuna_core.runtime.optim.optimizers import Lamb


@dataclass(kw_only=True)
class Case(train_rank.Case):
    """What to train, and in which precision."""

    precision: str = "bf16"
    optimizer: str = "sgd"
    scaling: dict[str, Any] = field(default_factory=lambda: {"init_loss_scale": 2.0**10})
    """Arguments of set_optimizer."""

    poison: dict[str, list[Any]] = field(default_factory=dict)
    """Of a step: "forward" or "backward", and the value that the embedding then gives."""

    every: int = 1
    """Steps whose gradients add up before an update."""

    frozen: list[int] = field(default_factory=list)
    """Steps in which the positions are not trained."""

    zero: int = 0
    offload: str | None = None
    wide: bool = False
    """Products add to the sums in fp32, as a GPU's do."""

    schedule_rate: str = ""
    """A learning rate scheduler, made "before" or "after" set_optimizer."""


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str, value: float) -> Tensor:
        ctx.value = value if where == "backward" else None
        return x * value if where == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.value is None else torch.full_like(grad, ctx.value), None, None


class PoisonGpt(models.Gpt):
    """Something goes wrong in the embedding, in the first stage alone, when the batch says so."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        self.poison = options.get("poison")
        return super().forward(ids, labels)

    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids)
        if self.poison:
            x = _Poison.apply(x, *self.poison)  # type: ignore[no-untyped-call]
        return x


class FullLossGpt(models.Gpt):
    """Its loss is in fp32, so that a scale may be more than fp16 holds."""

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        logits = self.head(self.norm(x)).float()
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ReentrantGpt(models.Gpt):
    """One block, called more than once in a backward that starts backwards of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)

    def run_block(self, number: int, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().run_block, number, x, use_reentrant=True)
        return out


class NormNet(models.ConvNet):
    """Its images are fractions, its batch norm stays in fp32."""


class Foreign:
    """No optimizer of torch: has groups and a step, and writes where no version is counted."""

    def __init__(self, params: Any, lr: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * parameter.grad


def build_optimizer(name: str, named: Mapping[str, nn.Parameter]) -> Any:
    if name == "foreign":
        return Foreign(named.values(), 0.05)
    if name == "groups":
        decayed = [p for p in named.values() if p.dim() > 1]
        others = [p for p in named.values() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.002}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0, eps=1e-3)
    if name == "lamb":
        return Lamb(named.values(), lr=0.01, eps=1e-3, max_grad_norm=0.5)
    return torch.optim.SGD(named.values(), lr=train_rank.RATE, momentum=train_rank.MOMENTUM)


def build_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    own = {"PoisonGpt": PoisonGpt, "NormNet": NormNet, "ReentrantGpt": ReentrantGpt}
    own["FullLossGpt"] = FullLossGpt
    made: Callable[..., nn.Module] = own.get(case.model) or getattr(models, case.model)
    return made(**case.options)


def make_batch(case: Case, step: int) -> dict[str, Any]:
    if case.model == "NormNet":
        return models.make_images(case.batches[step])
    return {**train_rank.make_batch(case, step), "poison": case.poison.get(str(step))}


@contextmanager
def widening(case: Case) -> Iterator[None]:
    """On a processor in place of a GPU's kernel; nothing on a GPU, which always does so."""
    if not case.wide or choose_device() != CPU:
        yield
        return

    def add_product(wide: Any, grad: Tensor, input: Tensor) -> None:
        total, factor = wide
        total.add_((grad.t().float() @ input.flatten(0, -2).float()), alpha=factor)

    with (
        mock.patch.object(grads, "can_add_wide", lambda total: True),
        mock.patch.object(weight_grads, "add_product", add_product),
    ):
        yield


def train(case: Case, rank: int) -> dict[str, Any]:
    varuna = Varuna(
        build_model(case),
        case.stage_map,
        make_batch(case, 0),
        max(case.batches),
        case.chunk_size,
        device=choose_device(),
        precision=case.precision,
        partition=case.partition,
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        recompute=case.recompute,  # type: ignore[arg-type]  # text from a file
        zero=case.zero,
        offload=case.offload,
        cuda_graphs=case.cuda_graphs,
    )
    optimizer = build_optimizer(case.optimizer, dict(varuna.named_parameters()))
    scheduler: Any = None
    if case.schedule_rate == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    varuna.set_optimizer(optimizer, **case.scaling)
    if case.schedule_rate == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    result: dict[str, Any] = {word: [] for word in ("losses", "norms", "overflows", "scales")}
    result["early"] = []
    reduce = varuna.gradients.reduce

    def count_early(compute_factor: Callable[[], float] | None) -> None:
        result["early"].append((varuna.gradients._started, len(varuna.gradients._buckets)))
        reduce(compute_factor)

    varuna.gradients.reduce = count_early  # type: ignore[method-assign]
    for step, size in enumerate(case.batches):
        held = range(min(varuna.samples.start, size), min(varuna.samples.stop, size))
        batch = train_rank.cut_batch(make_batch(case, step), size, held)
        result["scales"].append(varuna.updates.scale)
        if case.frozen and "wpe.weight" in varuna.masters():
            varuna.masters()["wpe.weight"].requires_grad_(step not in case.frozen)
        loss, overflow = varuna.step(batch, case.clip)
        result["losses"].append(loss)
        result["norms"].append(varuna.last_grad_norm)
        result["overflows"].append(overflow)
        if step == 0:
            result["gradients"] = {
                name: master.grad.clone()
                for name, master in varuna.masters().items()
                if master.grad is not None
            }
            slices = varuna._masters.slices
            result["first rows"] = {name: rows.box.offset[0] for name, rows in slices.items()}
        if (step + 1) % case.every:
            continue
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step % 2 and hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad()
        else:
            varuna.zero_grad(set_to_none=step % 4 == 0)
    result["state"] = take_state(varuna)
    result["recorded"] = train_rank.count_recorded(varuna)
    result["types"] = {str(p.dtype) for p in varuna.part.parameters().values()}
    result["held"] = count_held(varuna, optimizer)
    varuna.eval()
    result["evaluated"] = varuna.evaluate(batch)
    whole = gather_slices(varuna)
    result["weights"] = {n: p.detach().clone() for n, p in varuna.part.parameters().items()} | whole
    varuna.close()
    return result


def gather_slices(varuna: Varuna) -> dict[str, Any]:
    """The whole weights of ZeRO 3; every replica asks."""
    slices: Any = varuna._masters.slices
    varuna._masters.refresh()  # as where the next step begins
    for name, rows in slices.items():
        (stage,) = (s for s in varuna.part.stages if rows.segment in s.segments)
        assert stage.module.get_parameter(name) is rows.sharded  # the whole one is let go
    return {name: rows.sharded.full_tensor().detach() for name, rows in slices.items()}


def take_state(varuna: Varuna) -> dict[str, Any]:
    whole = gather_slices(varuna)
    if not whole:
        return varuna.state_dict()
    held = {name: p.detach() for name, p in varuna.masters().items() if name not in whole}
    return {**held, **whole, **dict(varuna.named_buffers())}


def count_held(varuna: Varuna, optimizer: Any) -> dict[str, int]:
    """Elements of the stage's weights, and of what this rank holds of them."""
    slices = varuna._masters.slices.values()
    places = [*varuna.gradients.parameters, *(rows.own for rows in slices)]
    places += [p for p in varuna.parameters() if all(p is not place for place in places)]
    grads = [p.grad for p in places if p.grad is not None]
    state = [
        tensor
        for held in getattr(optimizer, "state", {}).values()
        for tensor in held.values()
        if isinstance(tensor, Tensor) and tensor.dim()
    ]
    weights = [*varuna.part.parameters().values(), *(rows.sharded for rows in slices)]
    return {
        "weights": sum({id(p): p.numel() for p in weights}.values()),
        "masters": sum(p.numel() for p in varuna.parameters()),
        "largest": max(p.numel() for p in weights),
        "sliced": sum(rows.sharded.numel() for rows in slices),
        "gradients": sum(grad.numel() for grad in grads),
        "state": sum(tensor.numel() for tensor in state),
    }


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    grads.BUCKET_BYTES = 4000  # these models are small
    weight_grads.LARGE = 0
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        with leave_groups(), train_rank.recording(case), widening(case):
            result = train(case, rank)
        torch.save(result, folder / f"{case.name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

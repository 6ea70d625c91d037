"""FSDP2's folders of torch.distributed.checkpoint: `tests.ranks.dcp_rank <folder>`, two ranks.

FSDP2 trains and saves; it trains on, and so does Varuna from its folder in two layouts: straight
from the weights, and from an import with the optimizer's state. What Varuna exports, FSDP2 loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard

from tests.ranks.results import leave_results
from varuna_core import CutPoint, Varuna, open_weights
from varuna_core.checkpoint.cli import main as run_command

LAYOUTS = {"replicas": "0,1;", "stages": "1;0;"}
STEPS = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.cut = CutPoint()
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.cut(self.norm(self.first(x)).tanh())) - y).square().mean()


def make_batch(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(4, 5, generator=draw), torch.randn(4, 3, generator=draw)


def build_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train_fsdp(model: Any, optimizer: Any, begin: int, rank: int) -> list[float]:
    """Each rank trains half of the batch; the mean of both losses is the batch's."""
    losses = []
    for number in range(begin, begin + STEPS):
        x, y = make_batch(number)
        loss = model(x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        losses.append(mean.item() / 2)
    return losses


def train_varuna(model: Varuna, optimizer: Any, layout: str, rank: int) -> list[float]:
    losses = []
    for number in range(STEPS, 2 * STEPS):
        x, y = make_batch(number)
        if layout == "replicas":
            x, y = x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]
        losses.append(model.step({"x": x, "y": y})[0].item())
        optimizer.step()
        model.zero_grad()
    return losses


def start(layout: str, **more: Any) -> Varuna:
    x, y = make_batch(0)
    return Varuna(Model(), LAYOUTS[layout], {"x": x[:1], "y": y[:1]}, 4, 1, device="cpu", **more)


def main(folder: Path, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Model()
    fully_shard(model.first)
    fully_shard(model)
    optimizer = build_optimizer(model)
    train_fsdp(model, optimizer, 0, rank)
    held, state = get_state_dict(model, optimizer)
    dcp.save({"model": held, "optimizer": state}, checkpoint_id=folder / "fsdp")
    dcp.save(held, checkpoint_id=folder / "bare")
    told: dict[str, Any] = {"fsdp": train_fsdp(model, optimizer, STEPS, rank)}
    if rank == 0:
        words = ["import", str(folder / "fsdp"), str(folder / "ckpt"), "--optimizer", "AdamW"]
        assert run_command(words) == 0
    dist.barrier()
    for layout in LAYOUTS:
        for source in ("fsdp", "bare"):
            begun = start(layout, state_dict=open_weights(folder / source))
            held_by = begun.gather_state_dict()
            told[f"{layout} {source}"] = held_by and {n: t.tolist() for n, t in held_by.items()}
        varuna = start(layout)
        optimizer = build_optimizer(varuna)
        varuna.set_optimizer(optimizer)
        varuna.load_checkpoint(folder / "ckpt")
        told[layout] = train_varuna(varuna, optimizer, layout, rank)
        varuna.checkpoint(folder / layout, on_demand=True)  # complete when it returns
    if rank == 0:
        for layout in LAYOUTS:
            words = ["export", "--dcp", "--under", "model"]
            words += [str(folder / layout), str(folder / f"{layout}-dcp")]
            assert run_command(words) == 0
    dist.barrier()
    for layout in LAYOUTS:
        back: Any = Model()
        fully_shard(back)
        held = get_model_state_dict(back)
        dcp.load({"model": held}, checkpoint_id=folder / f"{layout}-dcp")
        whole, wanted = ({n: t.full_tensor() for n, t in one.items()} for one in
                         (held, get_model_state_dict(model)))  # fmt: skip
        told[f"{layout} apart"] = max(float((whole[n] - wanted[n]).abs().max()) for n in wanted)
    return told


if __name__ == "__main__":
    leave_results(main)

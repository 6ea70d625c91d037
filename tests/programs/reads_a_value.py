"""Trains a model whose forward reads a value of its tensors, which CUDA refuses to record."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from tests.models.small import Gpt, make_inputs
from tests.ranks.device import bring, choose_device
from varuna_core import Varuna


class Reading(Gpt):
    def run_block(self, number: int, x: Tensor) -> Tensor:
        return super().run_block(number, x if x.detach().abs().sum().item() else x + 1)


def train(**options: Any) -> list[float]:
    device = choose_device()
    torch.manual_seed(0)
    dummies, batch = (bring(make_inputs(count), device) for count in (2, 6))
    varuna = Varuna(Reading(), "0;", dummies, 6, 2, device=device, **options)
    optimizer = torch.optim.SGD(varuna.parameters(), lr=0.1)
    varuna.set_optimizer(optimizer)
    losses = []
    for _ in range(4):
        losses.append(float(varuna.step(batch)[0]))
        optimizer.step()
        varuna.zero_grad()
    return losses


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    print(train() == train(cuda_graphs=True))

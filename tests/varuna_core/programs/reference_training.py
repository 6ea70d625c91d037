"""Reference training that the programs are compared with: a plain torch loop in one process."""

from __future__ import annotations

import torch
from torch import nn

from tests.varuna_core.programs.trainings import shape
from varuna_core.programs.batches import TRAIN, VALID, open_source
from varuna_core.programs.building import LearningRate, build_model
from varuna_core.programs.gpt import Gpt
from varuna_core.records.training import Training
from varuna_core.runtime.split.weights import Weights


def train_plainly(
    training: Training, last: int | None = None
) -> tuple[dict[int, float], dict[int, float]]:
    """Losses and validation losses of an ordinary loop: torch alone, no micro-batches.

    It may end before its time, after step `last`.
    """
    meta = build_model(training)
    weights = Weights(model=meta, seed=training.seed)
    model = Gpt(**shape(training), llama=training.llama)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            names = [
                other
                for other, p in model.named_parameters(remove_duplicate=False)
                if p is parameter
            ]
            parameter.copy_(weights.make(tuple(names), meta.get_parameter(name)))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=training.lr,
        betas=training.betas,
    )
    rate = LearningRate(
        kind=training.lr_schedule, lr=training.lr, min_lr=training.min_lr,
        warmup_steps=training.warmup_steps, decay_steps=training.decay_steps,
    )  # fmt: skip
    source, size = open_source(training), training.global_batch_size
    losses, evaluated = {}, {}
    for step in range(1, (last or training.steps) + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate.at(step - 1)
        loss = model(**source.read(TRAIN, range((step - 1) * size, step * size)))
        optimizer.zero_grad()
        loss.backward()
        assert training.clip_grad_norm is not None
        nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
        optimizer.step()
        losses[step] = loss.item()
        if training.evaluate_every and step % training.evaluate_every == 0:
            count = training.evaluate_steps * size
            first = (step // training.evaluate_every - 1) * count
            with torch.no_grad():
                evaluated[step] = model(**source.read(VALID, range(first, first + count))).item()
    return losses, evaluated

"""Megatron-LM's legacy files of a checkpoint of pretrain_gpt, a file for each rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from varuna_core.checkpoint.foreign.megatron import (
    BLOCK,
    FILES,
    LATEST,
    OUTSIDE,
    GptReader,
    find_axis,
)
from varuna_core.checkpoint.store.reader import CheckpointReader


def write_legacy(
    saved: Path, target: Path, *, tensor: int = 1, pipeline: int = 1, vocab: int | None = None
) -> Path:
    """Write the files of all ranks; return the folder of the iteration."""
    with CheckpointReader(saved) as reader:
        model = GptReader.of(reader, vocab=vocab)
        place = target / f"iter_{reader.iteration:07d}"
        for stage in range(pipeline):
            for half in range(tensor):
                name = f"mp_rank_{half:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
                held = model.list_common()
                sizes = {"tensor_model_parallel_size": tensor}
                vars(held["args"]).update(sizes, pipeline_model_parallel_size=pipeline)
                held["model"] = build_rank(model, half, tensor, stage, pipeline)
                (place / name).mkdir(parents=True)
                torch.save(held, place / name / FILES[0])
        (target / LATEST).write_text(str(reader.iteration))
    return place


def build_rank(
    model: GptReader, half: int, num_halves: int, stage: int, num_stages: int
) -> dict[str, Tensor | None]:
    """The state dict of one rank's model; layers are counted from 0 in each stage."""
    count = model.sizes.layers // num_stages

    def cut(name: str) -> Tensor:
        axis, whole = find_axis(name), model.load(name)
        return whole if axis is None else whole.chunk(num_halves, axis)[half].clone()

    found: dict[str, Tensor | None] = {}
    if stage == 0:
        found |= {OUTSIDE[name]: cut(name) for name in ("tokens.weight", "positions.weight")}
    for number in range(count):
        for ours, theirs in BLOCK.items():
            for kind in ("weight", "bias"):
                name = f"blocks.{stage * count + number}.{ours}.{kind}"
                found[f"decoder.layers.{number}.{theirs}.{kind}"] = cut(name)
            if ".linear_" in theirs:
                found[f"decoder.layers.{number}.{theirs}._extra_state"] = None
    if stage == num_stages - 1:
        found |= {OUTSIDE[name]: cut(name) for name in ("norm.weight", "norm.bias")}
        found |= {"output_layer.weight": cut("tokens.weight")} if num_stages > 1 else {}
        found["output_layer._extra_state"] = None
    return found

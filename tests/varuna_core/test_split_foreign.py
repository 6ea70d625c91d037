"""A model that knows nothing of us: Hugging Face's GPT-2, cut between its blocks by hooks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.varuna_core.models import chain, chain_backward, sum_gradients
from varuna_core.cut import CutPoint
from varuna_core.split import split_model

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers itself warns of

NUM_LAYERS = 4


def build_gpt2() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=NUM_LAYERS, n_head=2, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    blocks: Any = model.transformer.h  # type: ignore[union-attr]
    for block in blocks:
        block.cut = CutPoint()
        block.register_forward_pre_hook(enter_block)
    model.transformer.ln_f.cut = CutPoint()  # type: ignore[union-attr]
    model.transformer.ln_f.register_forward_pre_hook(enter_block)  # type: ignore[union-attr]
    return model


def enter_block(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (block.cut(args[0]), *args[1:])


def make_inputs(size: int = 2, length: int = 16) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (size, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, length - 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.parametrize("partition", ["4", "2-2", "0-4-0", "1-0-3"])
def test_gpt2_is_cut_between_its_blocks(partition: str) -> None:
    torch.manual_seed(0)
    model = build_gpt2()
    num_stages = partition.count("-") + 1
    split = split_model(model, make_inputs(), num_stages, partition)
    stages = [split.make_stage(i) for i in range(num_stages)]
    assert [tie.names for tie in split.ties] == [("transformer.wte.weight", "lm_head.weight")]
    for inputs in (make_inputs(), make_inputs(3, 9)):
        model.zero_grad()
        for stage in stages:
            stage.module.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        out, log = chain(stages, inputs)
        chain_backward(log, out.loss)
        torch.testing.assert_close(out.loss, loss, rtol=0, atol=0)
        summed = sum_gradients(split, stages)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(summed[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)

"""A model that knows nothing of us: Hugging Face's GPT-2, cut between its blocks by hooks."""

from __future__ import annotations

import pytest
import torch

from tests.models.foreign import build_gpt2, make_text
from tests.models.small import chain, chain_backward, sum_gradients
from varuna_core.runtime.split.split import split_model

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers itself warns of
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("partition", ["4", "2-2", "0-4-0", "1-0-3"])
def test_gpt2_is_cut_between_its_blocks(partition: str) -> None:
    torch.manual_seed(0)
    model = build_gpt2()
    num_stages = partition.count("-") + 1
    split = split_model(model, make_text(2), num_stages, partition)
    stages = [split.make_stage(i) for i in range(num_stages)]
    assert [tie.names for tie in split.ties] == [("transformer.wte.weight", "lm_head.weight")]
    for inputs in (make_text(2), make_text(3, length=9)):
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

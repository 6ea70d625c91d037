"""BERT's losses are means over the whole batch: over its masked tokens, and over its pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.varuna_core.programs.program_rank import Case, train
from tests.varuna_core.programs.trainings import BERT, shape
from varuna_core import Varuna
from varuna_core.programs.batches import TRAIN, VALID, Batch, open_source
from varuna_core.programs.bert import NO_LABEL, Bert

SIZE = 8


def read_uneven(part: str = TRAIN) -> Batch:
    """Some samples have one masked token, others many."""
    batch = open_source(BERT).read(part, range(SIZE))
    batch["labels"] = batch["text"].clone()
    for sample in range(SIZE):
        batch["labels"][sample, 1 + sample * sample % 13 :] = NO_LABEL
    batch["labels"][2] = NO_LABEL
    return batch


def make_model() -> Bert:
    torch.manual_seed(0)
    return Bert(**shape(BERT))


def compute_plainly(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole batch at once, by torch's own means."""
    model = make_model()
    tokens, order = model.predict(batch["text"], batch["types"], batch["padding_mask"])
    loss = nn.functional.cross_entropy(
        tokens.flatten(0, 1), batch["labels"].flatten(), ignore_index=NO_LABEL
    ) + nn.functional.cross_entropy(order, batch["is_random"])
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 8])
def test_berts_gradients_do_not_depend_on_the_micro_batch(chunk_size: int) -> None:
    batch = read_uneven()
    loss, gradients = compute_plainly(batch)
    varuna = Varuna(make_model(), "0;", batch, SIZE, chunk_size, device="cpu")
    found, _ = varuna.step(batch)
    torch.testing.assert_close(found, loss)
    ours = {n: p.grad for n, p in varuna.named_parameters() if p.grad is not None}
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    varuna.close()


@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_berts_evaluation_does_not_depend_on_the_micro_batch(chunk_size: int) -> None:
    batch = read_uneven(VALID)
    varuna = Varuna(make_model(), "0;", batch, SIZE, chunk_size, device="cpu")
    torch.testing.assert_close(varuna.evaluate(batch), compute_plainly(batch)[0])
    varuna.close()


def test_a_bert_prints_the_same_losses_with_micro_batches_of_any_size() -> None:
    def losses(micro_batch_size: int) -> list[float]:
        training = replace(BERT, micro_batch_size=micro_batch_size)
        found = train(Case(name="", stage_map="0;", training=training), 0, 1).losses
        return [found[step] for step in sorted(found)]

    whole = losses(8)
    for size in (1, 2, 3):
        assert losses(size) == pytest.approx(whole, rel=2e-5)

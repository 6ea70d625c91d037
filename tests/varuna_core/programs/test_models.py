"""The models are GPT-2 and BERT: transformers' own, with our weights, give the same numbers."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.varuna_core.programs.trainings import BERT, GPT, shape
from varuna_core.checkpoint.foreign.names import Program, find_place
from varuna_core.programs.batches import TRAIN, open_source
from varuna_core.programs.bert import Bert
from varuna_core.programs.building import build_model
from varuna_core.programs.gpt import Gpt
from varuna_core.programs.layers import Dense, compile_blocks
from varuna_core.runtime.engine.weight_grads import WeightGrads
from varuna_core.runtime.split.split import split_model
from vjob.jobs.conf.schema import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers and torch.compile warn of


def fill(model: nn.Module) -> dict[str, Tensor]:
    """Values everywhere, in biases and norms too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.state_dict()


def rename(program: Program, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names and shapes of transformers."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place = find_place(program, name)
        held = tensor.t() if place.transposed else tensor
        for theirs, part in zip(place.parts, held.chunk(len(place.parts)), strict=True):
            found[theirs] = part.contiguous()
        found |= {other: found[place.parts[0]] for other in place.also}
    return found


def load(theirs: Any, renamed: dict[str, Tensor]) -> Any:
    missing, unexpected = theirs.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert not set(missing) & dict(theirs.named_parameters()).keys()
    return theirs.eval()


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(1, 8, 1), (3, 24, 4)])
def test_transformers_gpt2_with_our_weights_gives_the_same_logits(
    layers: int, hidden: int, heads: int
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = Gpt(layers=layers, hidden=hidden, heads=heads, sequence=12, vocab=50, dropout=0.1)
    state = fill(model)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=12, n_embd=hidden, n_layer=layers, n_head=heads,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = load(transformers.GPT2LMHeadModel(config), rename("pretrain_gpt", state))
    tokens = torch.randint(50, (3, 12))
    with torch.no_grad():
        ours = model.eval().predict(tokens)
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        loss = theirs(tokens, labels=tokens).loss
        torch.testing.assert_close(model(tokens), loss, rtol=1e-4, atol=1e-4)


def test_transformers_bert_with_our_weights_gives_the_same_logits_and_loss() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    training = replace(BERT, layers=3, hidden=24, heads=4)
    model = Bert(**shape(training))
    state = fill(model)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=16,
    )  # fmt: skip
    theirs = load(transformers.BertForPreTraining(config), rename("pretrain_bert", state))
    batch = open_source(training).read(TRAIN, range(4))
    batch["padding_mask"][1, 11:] = 0
    batch["labels"][1, 11:] = -1
    with torch.no_grad():
        tokens, order = model.eval().predict(batch["text"], batch["types"], batch["padding_mask"])
        found = theirs(
            batch["text"],
            attention_mask=batch["padding_mask"],
            token_type_ids=batch["types"],
            labels=torch.where(batch["labels"] < 0, -100, batch["labels"]),
            next_sentence_label=batch["is_random"],
        )
        seen = batch["padding_mask"].bool()
        torch.testing.assert_close(
            tokens[seen], found.prediction_logits[seen], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(order, found.seq_relationship_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(**batch).mean(), found.loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [GPT, BERT], ids=["gpt", "bert"])
def test_a_partition_counts_layers_and_the_weights_do_not_depend_on_it(training: Any) -> None:
    batch = open_source(training).read(TRAIN, range(2))
    found: list[dict[str, Tensor]] = []
    for partition in ("4", "1-0-3", "0-4-0"):
        split = split_model(build_model(training), batch, partition.count("-") + 1, partition)
        stages = [split.make_stage(index, seed=5) for index in range(len(split.stages))]
        found.append({n: p.detach() for stage in stages for n, p in stage.parameters().items()})
    first, *others = found
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_initial_weights_are_gpt2s() -> None:
    model = Gpt(layers=8, hidden=64, heads=2, sequence=16, vocab=99, dropout=0.0)
    stds = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert stds["blocks.3.attention.qkv.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["blocks.3.mlp.output.weight"] == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert stds["tokens.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["blocks.0.mlp.inner.bias"] == 0
    assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2-small", 124),
        ("gpt2-medium", 355),
        ("gpt2-xl", 1558),
        ("gpt2-2.5b", 2489),
        ("gpt2-8.3b", 8314),
        ("bert-large", 336),
    ],
)
def test_the_family_has_its_sizes_and_takes_no_memory(name: str, millions: int) -> None:
    program = "pretrain_bert" if name.startswith("bert") else "pretrain_gpt"
    model = build_model(replace(GPT, program=program, **asdict(MODELS[name])))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_a_sample_longer_than_the_model_is_refused() -> None:
    model = Gpt(layers=1, hidden=8, heads=1, sequence=4, vocab=9, dropout=0.0)
    with pytest.raises(ValueError, match="a sample has 6 tokens, but the model has 4 positions"):
        model.predict(torch.zeros(1, 6, dtype=torch.long))


def test_compiled_blocks_compute_the_same() -> None:
    torch.manual_seed(0)
    model = Gpt(**shape(GPT))
    tokens = torch.randint(64, (2, 9))
    loss = model(tokens)
    assert compile_blocks(model, backend="aot_eager") == GPT.layers
    torch.testing.assert_close(model(tokens), loss)


def test_the_models_linear_layers_put_off_their_weight_gradients() -> None:
    """They are a class of their own; with zero_bubble they must still fill the bubbles."""
    grads, layer = WeightGrads(), Dense(3, 2)
    grads.install(layer)
    with grads.collecting() as products:
        layer(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert layer.weight.grad is None
    for work in products:
        work()
    assert layer.weight.grad is not None

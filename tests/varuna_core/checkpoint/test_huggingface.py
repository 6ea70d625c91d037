"""Hugging Face's folders to checkpoints and back, tensor by tensor; what differs is refused."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.foreign import is_installed, load_transformers
from tests.varuna_core.programs.program_rank import Case, train
from tests.varuna_core.programs.trainings import GPT
from varuna_core import open_weights
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.foreign.huggingface import export_folder, import_folder
from varuna_core.checkpoint.foreign.names import (
    Sizes,
    find_program,
    list_differences,
    list_shapes,
    render_config,
)
from varuna_core.checkpoint.foreign.weight_files import StoredWeights
from varuna_core.checkpoint.format.entries import CheckpointPart, make_entry
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import TrainingState
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.writer import CheckpointWriter
from varuna_core.programs.batches import TRAIN, open_source
from varuna_core.programs.bert import Bert
from varuna_core.programs.gpt import Gpt
from varuna_core.programs.place import ProgramError

SIZES = Sizes(layers=3, hidden=16, sequence=12, vocab=50)
HEADS = 4
needs_transformers = pytest.mark.skipif(
    not is_installed("gpt2"), reason="transformers is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers itself warns of


def build(program: str) -> nn.Module:
    """Ours, with values in biases and norms too."""
    torch.manual_seed(0)
    make = Gpt if program == "pretrain_gpt" else Bert
    model = make(
        layers=SIZES.layers, hidden=SIZES.hidden, heads=HEADS, sequence=SIZES.sequence,
        vocab=SIZES.vocab, dropout=0.0,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def build_theirs(program: str) -> Any:
    library = load_transformers()
    torch.manual_seed(1)
    config = render_config(program, SIZES, HEADS, "float32")  # type: ignore[arg-type]
    kind = library.GPT2Config if program == "pretrain_gpt" else library.BertConfig
    made = getattr(library, config["architectures"][0])(kind(**config))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def save(model: nn.Module, store: Path, user: Any = None) -> Path:
    state = model.state_dict()
    tie = [
        "tokens.weight",
        "head.weight" if isinstance(model, Gpt) else "token_head.decoder.weight",
    ]
    writer = CheckpointWriter(store, job="a")
    writer.save(
        CheckpointPart(
            iteration=3,
            segments={0: [make_entry("weight", n, t) for n, t in state.items() if n != tie[1]]},
            state=TrainingState(
                partition="",
                shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
                ties=[tie],
                user=user,
            ),
        )
    )
    writer.close()
    return store / "varuna_ckpt_3"


def predict(model: Any) -> tuple[Tensor, ...]:
    tokens = torch.randint(SIZES.vocab, (3, SIZES.sequence), generator=torch.manual_seed(4))
    types, mask = tokens % 2, torch.ones_like(tokens)
    mask[1, 9:] = 0
    with torch.no_grad():
        if isinstance(model, Gpt):
            return (model.predict(tokens),)
        if isinstance(model, Bert):
            logits, order = model.predict(tokens, types, mask)
            return logits[mask.bool()], order
        if model.config.model_type == "gpt2":
            return (model(tokens).logits,)
        out = model(tokens, attention_mask=mask, token_type_ids=types)
        return out.prediction_logits[mask.bool()], out.seq_relationship_logits


@pytest.mark.parametrize("program", ["pretrain_gpt", "pretrain_bert"])
def test_the_list_of_tensors_is_that_of_the_model(program: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in build(program).state_dict().items()}
    assert list_shapes(program, SIZES) == shapes  # type: ignore[arg-type]
    assert find_program(shapes) == (program, SIZES)
    assert find_program({**shapes, "more": (1,)}) is None
    assert find_program({"transformer.wte.weight": (3, 3)}) is None


@needs_transformers
@pytest.mark.parametrize("program", ["pretrain_gpt", "pretrain_bert"])
def test_a_checkpoint_of_ours_is_their_model(tmp_path: Path, program: str) -> None:
    ours = build(program)
    save(ours, tmp_path / "ckpt", user={"taken": 3, "model": {"heads": HEADS}})
    words = ["export", "--hf", str(tmp_path / "ckpt"), str(tmp_path / "hf"), "--shard-mb", "0"]
    assert main(words) == 0
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert "model.safetensors.index.json" in files and len(files) > 10
    library = load_transformers()
    kind = getattr(
        library, "GPT2LMHeadModel" if program == "pretrain_gpt" else "BertForPreTraining"
    )
    theirs, told = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    for found, wanted in zip(predict(theirs.eval()), predict(ours), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    import_folder(tmp_path / "hf", tmp_path / "again", program=program)  # type: ignore[arg-type]
    with CheckpointReader.open(tmp_path / "again") as reader:
        state = {name: reader.read(name) for name in reader.state.shapes}
    assert state.keys() == ours.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in ours.state_dict().items())


@needs_transformers
@pytest.mark.parametrize("program", ["pretrain_gpt", "pretrain_bert"])
def test_their_model_is_a_checkpoint_of_ours(tmp_path: Path, program: str) -> None:
    theirs = build_theirs(program)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    words = ["import", str(tmp_path / "hf"), str(tmp_path / "ckpt"), "--program", program]
    assert main(words) == 0
    ours = build(program)
    with CheckpointReader.open(tmp_path / "ckpt") as reader:
        assert reader.iteration == 0
        ours.load_state_dict({name: reader.read(name) for name in reader.state.shapes}, strict=True)
    for found, wanted in zip(predict(ours), predict(theirs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@needs_transformers
def test_a_program_begins_with_their_weights(tmp_path: Path) -> None:
    training = replace(GPT, checkpoint_folder=str(tmp_path / "ckpt"), steps=2)
    library = load_transformers()
    config = library.GPT2Config(
        vocab_size=64,
        n_positions=20,
        n_embd=16,
        n_layer=4,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = library.GPT2LMHeadModel(config).eval()
    theirs.transformer.save_pretrained(tmp_path / "hf")  # as the hub has it: without its head
    import_folder(tmp_path / "hf", tmp_path / "ckpt", program="pretrain_gpt", sequence=8)
    batch = open_source(training).read(TRAIN, range(training.global_batch_size))["tokens"]
    logits = theirs(batch[:, :-1]).logits
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    result = train(Case(name="a", stage_map="0;", training=training), 0, 1)
    assert result.losses[1] == pytest.approx(wanted.item(), rel=1e-5)
    assert set(result.losses) == {1, 2}
    export_folder(tmp_path / "ckpt" / "varuna_ckpt_2", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_head"] == 2
    train(Case(name="a", stage_map="0;", training=replace(training, steps=3)), 0, 1)

    import_folder(
        tmp_path / "hf", tmp_path / "late", program="pretrain_gpt", sequence=8, iteration=9
    )
    late = replace(training, checkpoint_folder=str(tmp_path / "late"), steps=12)
    with pytest.raises(ProgramError, match="--iteration 0"):
        train(Case(name="a", stage_map="0;", training=late), 0, 1)


def test_words_are_added_and_left_out_and_positions_left_out(tmp_path: Path) -> None:
    ours = build("pretrain_gpt")
    folder = save(ours, tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="model's number of attention heads: add --heads"):
        export_folder(folder, tmp_path / "hf")
    assert not list(tmp_path.glob(".hf*")), "nothing is left of what failed"
    export_folder(folder, tmp_path / "hf", heads=HEADS, vocab=44, dtype="bfloat16")
    found = open_weights(tmp_path / "hf")
    state = ours.state_dict()
    wte = found["transformer.wte.weight"]
    assert wte.dtype == torch.bfloat16 and torch.equal(wte, state["tokens.weight"][:44].bfloat16())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"]) == (44, "bfloat16")
    made = import_folder(
        tmp_path / "hf", tmp_path / "again", program="pretrain_gpt", vocab=48, sequence=7
    )
    with CheckpointReader(made) as reader:
        tokens = reader.read("head.weight")
        assert torch.equal(tokens[:44], wte) and tokens.shape == (48, 16) and not tokens[44:].any()
        assert torch.equal(
            reader.read("positions.weight"), state["positions.weight"][:7].bfloat16()
        )
    for words, said in (
        ({"vocab": 43}, "vocab 43 is less than the 44 tokens of the checkpoint"),
        ({"sequence": 13}, "sequence 13 exceeds 12 positions"),
    ):
        with pytest.raises(CheckpointError, match=said):
            import_folder(tmp_path / "hf", tmp_path / "no", program="pretrain_gpt", **words)
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        export_folder(folder, tmp_path / "hf", heads=HEADS)
    with pytest.raises(CheckpointError, match="the model's width 16 is not divisible by 5 heads"):
        export_folder(folder, tmp_path / "odd", heads=5)
    with pytest.raises(CheckpointError, match="vocab 51: expected 1 to 50"):
        export_folder(folder, tmp_path / "odd", heads=4, vocab=51)


def test_a_part_of_the_model_that_trained_is_exported_by_its_prefix(tmp_path: Path) -> None:
    shapes = {
        "inner.b.w": (2,),
        "inner.a.w": (3,),
        "scale": (1,),
        "head.w": (3,),
        "inner.c.w": (3,),
    }
    tied = {"inner.a.w": torch.arange(3.0), "inner.b.w": torch.ones(2), "scale": torch.ones(1)}
    writer = CheckpointWriter(tmp_path / "ckpt", job="a")
    ties = [["head.w", "inner.a.w", "inner.c.w"]]
    entries = [make_entry("weight", "head.w", tied.pop("inner.a.w"))]
    entries += [make_entry("weight", name, tensor) for name, tensor in tied.items()]
    state = TrainingState(partition="", shapes=shapes, ties=ties)
    writer.save(CheckpointPart(iteration=3, segments={0: entries}, state=state))
    writer.close()
    words = ["export", "--hf", str(tmp_path / "ckpt"), str(tmp_path / "hf"), "--prefix", "inner."]
    assert main(words) == 0
    found = open_weights(tmp_path / "hf")
    assert {name: found[name].tolist() for name in found} == {"a.w": [0, 1, 2], "b.w": [1, 1]}
    with pytest.raises(CheckpointError, match=r"has no name that begins with 'other\.'"):
        export_folder(tmp_path / "ckpt" / "varuna_ckpt_3", tmp_path / "no", prefix="other.")


@pytest.mark.parametrize(
    ("program", "change", "said"),
    [
        (
            "pretrain_gpt",
            {"activation_function": "relu"},
            "activation_function 'relu', ours is 'gel",
        ),
        ("pretrain_gpt", {"n_inner": 24}, "n_inner 24, ours is 64"),
        ("pretrain_gpt", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06, ours is 1e-05"),
        (
            "pretrain_gpt",
            {"scale_attn_by_inverse_layer_idx": True},
            "inverse_layer_idx True, ours is",
        ),
        ("pretrain_gpt", {"tie_word_embeddings": False}, "tie_word_embeddings False, ours is True"),
        (
            "pretrain_gpt",
            {"model_type": "gpt_neox"},
            "model_type 'gpt_neox' is not what pretrain_gpt t",
        ),
        ("pretrain_bert", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new', ours is 'gelu'"),
        ("pretrain_bert", {"intermediate_size": 48}, "intermediate_size 48, ours is 64"),
        ("pretrain_bert", {"position_embedding_type": "relative_key"}, "ours is 'absolute'"),
        ("pretrain_bert", {"is_decoder": True}, "is_decoder True, ours is False"),
    ],
)
def test_other_mathematics_are_refused_with_the_reason(
    tmp_path: Path, program: Any, change: dict[str, Any], said: str
) -> None:
    folder = save(build(program), tmp_path / "ckpt")
    export_folder(folder, tmp_path / "hf", heads=HEADS)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert not list_differences(program, config)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=said):
        import_folder(tmp_path / "hf", tmp_path / "no", program=program)
    assert not (tmp_path / "no").exists()


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    folder = save(build("pretrain_bert"), tmp_path / "ckpt")
    export_folder(folder, tmp_path / "hf", heads=HEADS)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"has no 'bert.encoder.layer.3..*BertForPreTraining"):
        import_folder(tmp_path / "hf", tmp_path / "no", program="pretrain_bert")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "vocab_size": 60}))
    with pytest.raises(
        CheckpointError, match=r"word_embeddings.weight' has shape \[50, 16\] in .*\[60, 16\]"
    ):
        import_folder(tmp_path / "hf", tmp_path / "no", program="pretrain_bert")
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        import_folder(tmp_path / "hf", tmp_path / "no", program="pretrain_bert")


def test_neither_way_holds_more_than_a_tensor_or_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(build("pretrain_gpt"), tmp_path / "ckpt")
    live: dict[int, int] = {}
    most = [0]

    def watch(tensor: Tensor) -> Tensor:
        size = tensor.untyped_storage().nbytes()
        live[id(tensor)] = size
        weakref.finalize(tensor, live.pop, id(tensor), None)
        most[0] = max(most[0], sum(live.values()))
        return tensor

    read = CheckpointReader.read
    monkeypatch.setattr(CheckpointReader, "read", lambda *a, **k: watch(read(*a, **k)))
    export_folder(folder, tmp_path / "hf", heads=HEADS, shard_bytes=20_000)
    largest = max(
        laid.num_bytes
        for laid in map(open_weights(tmp_path / "hf").describe, open_weights(tmp_path / "hf"))
    )
    assert 0 < most[0] <= 2 * largest
    most[0] = 0
    take = StoredWeights.__getitem__
    monkeypatch.setattr(StoredWeights, "__getitem__", lambda self, name: watch(take(self, name)))
    import_folder(tmp_path / "hf", tmp_path / "again", program="pretrain_gpt")
    assert 0 < most[0] <= 2 * largest

"""Llama and Qwen are transformers' own: equal logits both ways, and equal training in any cut."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.foreign import is_installed, load_transformers
from tests.varuna_core.programs.program_rank import Case, train
from tests.varuna_core.programs.trainings import GPT, shape
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.foreign.names import Sizes, list_differences, list_shapes, read_sizes
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.planner.profile.transformer import Transformer, list_parts
from varuna_core.programs.building import build_model
from varuna_core.programs.gpt import Gpt
from varuna_core.records.training import Llama, read_training, render_training
from varuna_core.runtime.split.split import split_model
from vjob.jobs.conf.schema import MODELS

needs_transformers = pytest.mark.skipif(
    not is_installed("llama"), reason="transformers is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers itself warns of
LLAMA = Llama(
    inner=40, kv_heads=2, head_size=8, tied=False, qkv_bias=False, qk_norm=False, norm_eps=1e-5,
    rope_base=500.0, rope_scaling=None,
)  # fmt: skip
KINDS = {
    "llama 2": replace(LLAMA, kv_heads=4),
    "llama 3.1": replace(LLAMA, rope_scaling=(4.0, 1.0, 4.0, 8.0)),
    "qwen 2": replace(LLAMA, qkv_bias=True, tied=True, norm_eps=1e-6),
    "qwen 3": replace(LLAMA, qk_norm=True, head_size=10, tied=True),
}
TINY = replace(GPT, layers=3, hidden=32, heads=4, sequence=16, llama=LLAMA)
kinds = pytest.mark.parametrize("llama", KINDS.values(), ids=KINDS)


def build(llama: Llama) -> Gpt:
    """Ours, with values in biases and norms too."""
    torch.manual_seed(0)
    model = Gpt(**shape(TINY), llama=llama)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader.open(folder) as reader:
        return {name: reader.read(name) for name in reader.state.shapes}


@kinds
def test_the_list_of_tensors_is_that_of_the_model(llama: Llama) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in build(llama).state_dict().items()}
    sizes = Sizes(layers=3, hidden=32, sequence=16, vocab=64, llama=llama)
    assert list_shapes("pretrain_gpt", sizes, 4) == shapes
    assert list(list_shapes("pretrain_gpt", sizes, 4)) == list(shapes)


@needs_transformers
@kinds
def test_a_trained_model_is_theirs_and_comes_back(tmp_path: Path, llama: Llama) -> None:
    store, folder = tmp_path / "ckpt", tmp_path / "hf"
    training = replace(TINY, llama=llama, steps=1, checkpoint_folder=str(store))
    train(Case(name="a", stage_map="0;", training=training), 0, 1)
    assert main(["export", "--hf", str(store), str(folder), "--shard-mb", "0"]) == 0
    assert (folder / "model.safetensors.index.json").is_file()
    library = load_transformers()
    theirs, told = library.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    ours, tokens = build(llama), torch.randint(64, (3, 16))
    ours.load_state_dict(read_state(store))
    with torch.no_grad():
        found, wanted = theirs.eval()(tokens).logits, ours.predict(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

    again = tmp_path / "again"
    assert main(["import", str(folder), str(again), "--program", "pretrain_gpt"]) == 0
    first, second = read_state(store), read_state(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert main(["export", "--hf", str(again), str(tmp_path / "hf2")]) == 0
    assert (folder / "config.json").read_text() == (tmp_path / "hf2" / "config.json").read_text()


@needs_transformers
@kinds
def test_their_model_has_the_same_logits_here(tmp_path: Path, llama: Llama) -> None:
    library = load_transformers()
    words: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": llama.inner,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": llama.kv_heads,
        "head_dim": llama.head_size, "rms_norm_eps": llama.norm_eps, "rope_theta": llama.rope_base,
        "max_position_embeddings": 16, "tie_word_embeddings": llama.tied,
    }  # fmt: skip
    if llama.rope_scaling is not None:
        words["rope_parameters"] = {
            "rope_type": "llama3", "rope_theta": llama.rope_base, "factor": 4.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
        }  # fmt: skip
    name = "Qwen3" if llama.qk_norm else "Qwen2" if llama.qkv_bias else "Llama"
    if name == "Qwen2":
        del words["head_dim"]
    torch.manual_seed(1)
    config = getattr(library, f"{name}Config")(**words)
    theirs = getattr(library, f"{name}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert read_sizes("pretrain_gpt", told)[0].llama == llama
    words_of = ["import", str(tmp_path / "hf"), str(tmp_path / "ckpt"), "--program", "pretrain_gpt"]
    assert main(words_of) == 0
    ours, tokens = build(llama), torch.randint(64, (3, 16))
    ours.load_state_dict(read_state(tmp_path / "ckpt"))
    with torch.no_grad():
        found, wanted = ours.predict(tokens), theirs(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window 8"),
        ({"rope_theta": None}, "rope_theta is not given"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
    ],
)
def test_other_mathematics_are_refused_with_the_reason(change: Any, reason: str) -> None:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "rope_theta": 1e4,
        "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 16,
        "vocab_size": 9,
    }  # fmt: skip
    assert not list_differences("pretrain_gpt", config)
    assert reason in "; ".join(list_differences("pretrain_gpt", {**config, **change}))


@kinds
def test_weights_do_not_depend_on_the_partition(llama: Llama) -> None:
    batch = {"tokens": torch.randint(64, (2, 9))}
    model = build_model(replace(TINY, llama=llama))
    assert all(parameter.is_meta for parameter in model.parameters())
    whole, *others = (
        {
            name: parameter.detach()
            for index in range(partition.count("-") + 1)
            for name, parameter in split_model(
                build_model(replace(TINY, llama=llama)), batch, partition.count("-") + 1, partition
            )
            .make_stage(index, seed=5)
            .parameters()
            .items()
        }
        for partition in ("3", "1-0-2", "0-3-0")
    )
    for other in others:
        assert whole.keys() == other.keys()
        assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_a_training_is_read_as_it_was_written(tmp_path: Path) -> None:
    training = replace(TINY, llama=KINDS["llama 3.1"])
    (tmp_path / "training.json").write_text(render_training(training))
    assert read_training(tmp_path / "training.json") == training


MILLIONS = {
    "llama-2-7b": 6738, "llama-3-8b": 8030, "llama-3.1-8b": 8030, "llama-3.1-70b": 70554,
    "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "qwen2.5-0.5b": 494, "qwen2.5-1.5b": 1544,
    "qwen2.5-7b": 7616, "qwen3-0.6b": 596, "qwen3-1.7b": 1721, "qwen3-8b": 8191,
}  # fmt: skip


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_the_named_shapes_have_the_published_sizes(name: str, millions: int) -> None:
    model = MODELS[name]
    values = {**asdict(model), "llama": model.build_llama()}
    built = build_model(replace(GPT, **values))
    assert round(sum(p.numel() for p in built.parameters()) / 1e6) == millions


@kinds
def test_the_planner_counts_the_parameters_that_it_has(llama: Llama) -> None:
    model = Transformer(
        name="", layers=3, hidden=32, heads=4, length=16, vocabulary=64, **list_parts(llama)
    )
    first, *blocks, last = model.build_model([1]).parameters[1]
    built = build(llama)
    own = sum(p.numel() for p in built.blocks[0].parameters())
    small = 2 * 32 + 3 * 4 * 10  # biases and norms of heads, which it does not count
    assert all(own - small <= block <= own for block in blocks)
    assert (first, last) == (64 * 32, 64 * 32 + 2 * 32), "the norm as GPT-2's"

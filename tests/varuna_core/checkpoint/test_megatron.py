"""Megatron-LM's checkpoints to ours and back, bit for bit; what ours computes otherwise is refused.

The last tests ask megatron-core itself: its model, cut in parts, and ours have the same logits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import ROOT
from tests.command import PROGRAMS
from tests.jobs.programs.free_port import find_free_port
from tests.varuna_core.checkpoint.legacy_megatron import write_legacy
from tests.varuna_core.checkpoint.test_huggingface import HEADS, SIZES, build, save
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.foreign.megatron import (
    BLOCK,
    FILES,
    import_megatron,
    interleave_heads,
    split_heads,
)
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.programs.gpt import Gpt

USER = {"model": {"heads": HEADS}}
Change = Callable[[dict[str, Any]], object]


def read(store: Path) -> dict[str, Tensor]:
    with CheckpointReader.open(store) as reader:
        return {name: reader.read(name) for name in reader.state.shapes}


def is_same(state: dict[str, Tensor], model: nn.Module) -> bool:
    wanted = model.state_dict()
    return state.keys() == wanted.keys() and all(torch.equal(state[n], wanted[n]) for n in wanted)


def change(folder: Path, alter: Change) -> None:
    """Another content of a file of one rank."""
    held = torch.load(folder / FILES[0], weights_only=False)
    alter(held)
    torch.save(held, folder / FILES[0])


@pytest.mark.parametrize("cuts", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_there_and_back_the_weights_are_the_same_bits(
    tmp_path: Path, cuts: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = build("pretrain_gpt")
    saved = save(ours, tmp_path / "ckpt", USER)
    write_legacy(saved, tmp_path / "theirs", tensor=cuts[0], pipeline=cuts[1])
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "again")]) == 0
    assert "imported the weights of" in capsys.readouterr().out
    assert is_same(read(tmp_path / "again"), ours)
    with CheckpointReader.open(tmp_path / "again") as reader:
        assert reader.state.user["model"] == {"heads": HEADS}


def test_heads_are_interleaved_and_split_again() -> None:
    packed = torch.arange(24).view(24, 1)
    theirs = interleave_heads(packed, 4).flatten().tolist()
    assert theirs[:6] == [0, 1, 8, 9, 16, 17], "query, key and value of the first head"
    assert torch.equal(split_heads(interleave_heads(packed, 4), 4), packed)


def test_older_names_in_nested_dicts_are_read(tmp_path: Path) -> None:
    ours = build("pretrain_gpt")
    folder = write_legacy(save(ours, tmp_path / "ckpt", USER), tmp_path / "theirs")
    parts = {
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }

    def alter(held: dict[str, Any]) -> None:
        model = {n: t for n, t in held["model"].items() if t is not None}
        encoder = {}
        for name, tensor in model.items():
            if name.startswith("decoder."):
                for new, old in parts.items():
                    name = name.replace(new, old)
                encoder[name.removeprefix("decoder.")] = tensor
        embedding = {
            part: {"weight": model[f"embedding.{part}.weight"]}
            for part in ("word_embeddings", "position_embeddings")
        }
        held["model"] = {"language_model": {"embedding": embedding, "encoder": encoder}}

    change(folder / "mp_rank_00", alter)
    import_megatron(folder, tmp_path / "again")
    assert is_same(read(tmp_path / "again"), ours)


def test_padding_of_words_comes_and_goes(tmp_path: Path) -> None:
    ours = build("pretrain_gpt")
    saved = save(ours, tmp_path / "ckpt", USER)
    write_legacy(saved, tmp_path / "theirs", tensor=4, vocab=512)
    words = ["import", str(tmp_path / "theirs"), str(tmp_path / "again")]
    assert main([*words, "--sequence", "5"]) == 0
    padded = read(tmp_path / "again")
    assert padded["tokens.weight"].shape == (512, SIZES.hidden)
    assert not padded["tokens.weight"][50:].any() and padded["positions.weight"].shape[0] == 5
    assert main([*words[:2], str(tmp_path / "more"), "--vocab", "50"]) == 0
    assert is_same(read(tmp_path / "more"), ours)


def put(**changed: Any) -> Change:
    return lambda held: vars(held["args"]).update(changed)


def drop(name: str) -> Change:
    return lambda held: held["model"].pop(name)


def add(name: str, *shape: int) -> Change:
    return lambda held: held["model"].update({name: torch.ones(shape)})


REFUSED: dict[str, tuple[Change, str]] = {
    "swiglu": (put(swiglu=True), r"swiglu True, ours is False"),
    "rotary": (put(position_embedding_type="rope"), r"'rope', ours is 'learned_absolute'"),
    "rms": (put(normalization="RMSNorm"), r"normalization 'RMSNorm', ours is 'LayerNorm'"),
    "gelu": (put(bias_gelu_fusion=False, openai_gelu=False), r"an exact gelu .* the tanh form"),
    "inner": (put(ffn_hidden_size=40), r"ffn_hidden_size 40, ours is 64"),
    "bias": (drop("decoder.layers.1.mlp.linear_fc1.bias"), r"has no blocks.1.mlp.inner.bias"),
    "position": (drop("embedding.position_embeddings.weight"), r"has no position embedding"),
    "grouped": (
        add("decoder.layers.0.self_attention.linear_qkv.weight", 24, 16),
        r"blocks.0.attention.qkv.weight is \[24, 16\], ours is \[48, 16\]",
    ),
    "untied": (add("output_layer.weight", 50, 16), r"word embedding are not tied"),
    "more": (add("decoder.layers.0.self_attention.q_layernorm.weight", 4), r"'decoder.*q_layern"),
    "old order": (lambda held: held.update(checkpoint_version=0), r"checkpoint_version 0, which"),
    "heads": (lambda held: held.pop("args"), r"number of attention heads: add --heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_is_refused_with_what_differs(tmp_path: Path, name: str) -> None:
    saved = save(build("pretrain_gpt"), tmp_path / "ckpt", USER)
    folder = write_legacy(saved, tmp_path / "theirs")
    alter, message = REFUSED[name]
    change(folder / "mp_rank_00", alter)
    with pytest.raises(CheckpointError, match=message):
        import_megatron(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_is_missing_or_torn_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save(build("pretrain_gpt"), tmp_path / "ckpt", USER)
    folder = write_legacy(saved, tmp_path / "theirs", tensor=2, pipeline=3)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path), "--iteration", "5"]) == 2
    assert "has no iteration 5: 3" in capsys.readouterr().err
    (folder / "mp_rank_01_002" / FILES[0]).write_bytes(b"torn")
    assert main(["import", str(folder), str(tmp_path / "again")]) == 1
    assert "mp_rank_01_002" in capsys.readouterr().err
    (folder / "mp_rank_01_001" / FILES[0]).unlink()
    assert main(["import", str(folder), str(tmp_path / "again")]) == 1
    assert "mp_rank_01_001 is missing" in capsys.readouterr().err


class Trap:
    """A pickle of this would touch a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_nothing_of_a_file_runs(tmp_path: Path) -> None:
    ours = build("pretrain_gpt")
    folder = write_legacy(save(ours, tmp_path / "ckpt", USER), tmp_path / "theirs")
    trap = str(tmp_path / "trapped")
    change(folder / "mp_rank_00", put(model_type=argparse.ArgumentParser, trap=Trap(trap)))
    import_megatron(folder, tmp_path / "again")
    assert is_same(read(tmp_path / "again"), ours)
    assert not Path(trap).exists()


def test_the_names_of_a_block_are_those_of_our_model() -> None:
    held = {name.rpartition(".")[0] for name in build("pretrain_gpt").blocks[0].state_dict()}  # type: ignore[index,union-attr]
    assert held == set(BLOCK)


# megatron-core itself.


def run_core(*words: str, world: int) -> None:
    port = find_free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", PROGRAMS / "engines/megatron_checkpoints.py", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **{"PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": str(world)},
                **{"LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"},
            },
        )
        for rank in range(world)
    ]
    try:
        told = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, told, strict=True):
        assert process.returncode == 0, text[-3000:]


@pytest.fixture(
    scope="module",
    params=[(2,), pytest.param((4, "Ettt|tL"), marks=pytest.mark.long)],
    ids=["halves", "halves of two stages"],
)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their model on so many ranks, each stage cut in two, and its logits."""
    pytest.importorskip("megatron.core", reason="megatron.core is not installed")
    folder = tmp_path_factory.mktemp("theirs")
    world, *layout = request.param
    run_core("save", str(folder), *layout, world=world)
    return folder


def load_ours(store: Path) -> Tensor:
    """Our logits of the tokens that their model has seen."""
    model = Gpt(layers=4, hidden=32, heads=4, sequence=16, vocab=64, dropout=0.0).eval()
    model.load_state_dict(read(store))
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return model.predict(tokens)


@pytest.mark.slow
def test_their_model_and_ours_have_the_same_logits(theirs: Path, tmp_path: Path) -> None:
    wanted = torch.load(theirs / "logits.pt")
    core = tmp_path / "core"
    for layout in ("legacy", "dist"):
        store = tmp_path / layout
        assert main(["import", str(theirs / layout), str(store)]) == 0
        torch.testing.assert_close(load_ours(store), wanted, rtol=1e-5, atol=1e-5)
    ours = read(tmp_path / "dist")
    assert all(torch.equal(tensor, ours[n]) for n, tensor in read(tmp_path / "legacy").items())

    assert main(["export", "--torch-dist", str(tmp_path / "dist"), str(core / "dist")]) == 0
    run_core("load", str(core), world=1)
    found = torch.load(core / "dist.pt")
    assert len(found["weights"]) == 4 + 4 * 12
    torch.testing.assert_close(found["logits"], wanted, rtol=1e-5, atol=1e-5)

    words = ["import", str(core / "numbered"), str(tmp_path / "again"), "--heads", "4"]
    assert main(words) == 0
    assert all(torch.equal(tensor, ours[n]) for n, tensor in read(tmp_path / "again").items())

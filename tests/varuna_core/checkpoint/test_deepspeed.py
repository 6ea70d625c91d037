"""Checkpoints of DeepSpeed's pipelines to ours and back, written and loaded by DeepSpeed itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import ROOT
from tests.command import PROGRAMS
from tests.jobs.programs.exported_scripts import find_free_port
from tests.varuna_core.checkpoint.test_huggingface import HEADS, build, save
from tests.varuna_core.checkpoint.test_megatron import USER, is_same, load_ours, read
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.foreign.deepspeed import STEPS
from varuna_core.checkpoint.foreign.megatron import BLOCK, find_axis, interleave_heads

NAMES = {
    **BLOCK,
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "norm_2": "post_attention_layernorm",
    "mlp.inner": "mlp.dense_h_to_4h",
    "mlp.output": "mlp.dense_4h_to_h",
}


def write_theirs(folder: Path, *, halves: int = 1) -> dict[str, Tensor]:
    """Their files of our model, cut for so many tensor ranks; the model's state."""
    state = build("pretrain_gpt").state_dict()
    layers: list[dict[str, str]] = [
        {f"{part}_embeddings.weight": f"{ours}.weight"
         for part, ours in (("word", "tokens"), ("position", "positions"))},
        *(
            {
                f"{theirs}.{kind}": f"blocks.{number}.{ours}.{kind}"
                for ours, theirs in NAMES.items()
                for kind in ("weight", "bias")
            }
            for number in range(3)
        ),
        {"weight": "norm.weight", "bias": "norm.bias"},
    ]  # fmt: skip
    place = folder / "global_step12"
    place.mkdir(parents=True)
    (folder / "latest").write_text(place.name)
    torch.save({"global_steps": 12, "checkpoint_version": 3.0}, place / STEPS)
    for index, names in zip((1, 3, 4, 5, 7), layers, strict=True):
        for half in range(halves):
            held = {}
            for theirs, ours in names.items():
                tensor, axis = state[ours], find_axis(ours)
                if ".qkv." in ours:
                    tensor = interleave_heads(tensor, HEADS)
                held[theirs] = tensor if axis is None else tensor.chunk(halves, axis)[half].clone()
            tail = f"-model_{half:02d}" if halves > 1 else ""
            torch.save(held, place / f"layer_{index:02d}{tail}-model_states.pt")
    return state


@pytest.mark.parametrize("halves", [1, 2])
def test_there_and_back_the_weights_are_the_same_bits(tmp_path: Path, halves: int) -> None:
    write_theirs(tmp_path / "theirs", halves=halves)
    words = ["import", str(tmp_path / "theirs"), str(tmp_path / "ckpt"), "--heads", str(HEADS)]
    assert main(words) == 0
    assert is_same(read(tmp_path / "ckpt"), build("pretrain_gpt"))
    export = ["export", str(tmp_path / "ckpt"), str(tmp_path / "again")]
    assert main([*export, "--deepspeed", str(tmp_path / "theirs")]) == 0
    files = sorted((tmp_path / "theirs/global_step12").glob("layer_*"))
    assert len(files) == 5 * halves
    for path in files:
        found = torch.load(tmp_path / "again/global_step12" / path.name)
        wanted = torch.load(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_layers_of_another_model_keep_their_names(tmp_path: Path) -> None:
    for index in (0, 2):
        held = {"weight": torch.full((2, 3), float(index)), "bias": torch.zeros(2)}
        torch.save(held, tmp_path / f"layer_{index:02d}-model_states.pt")
    assert main(["import", str(tmp_path), str(tmp_path / "ckpt")]) == 0
    state = read(tmp_path / "ckpt")
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(state["2.weight"], torch.full((2, 3), 2.0))


def change(path: Path, **changed: Any) -> None:
    torch.save(torch.load(path) | changed, path)


def test_what_differs_or_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(name: str, *more: str) -> str:
        words = ["import", str(tmp_path / name), str(tmp_path / "ckpt"), "--heads", str(HEADS)]
        assert main([*words, *more]) != 0
        return capsys.readouterr().err

    def copy(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "theirs", tmp_path / name)) / "global_step12"

    write_theirs(tmp_path / "theirs", halves=2)
    assert "has no global_step3" in take("theirs", "--iteration", "3")
    (copy("torn") / "layer_04-model_01-model_states.pt").unlink()
    assert "layer 4 has no model_01" in take("torn")
    change(copy("older") / STEPS, checkpoint_version=0)
    assert "checkpoint_version 0, whose query, key and value" in take("older")
    change(copy("more") / "layer_03-model_00-model_states.pt", gate=torch.ones(2))
    assert "has 'gate', which pretrain_gpt's model does not have" in take("more")
    change(copy("norm") / "layer_07-model_01-model_states.pt", bias=torch.ones(16) * 7)
    assert "norm.bias is not the same on all ranks" in take("norm")
    saved = save(build("pretrain_gpt"), tmp_path / "ours", USER)
    (tmp_path / "theirs/global_step12/layer_05-model_00-model_states.pt").unlink()
    (tmp_path / "theirs/global_step12/layer_05-model_01-model_states.pt").unlink()
    words = ["export", str(saved), str(tmp_path / "new"), "--deepspeed", str(tmp_path / "theirs")]
    assert main(words) == 1 and not (tmp_path / "new").exists()
    assert "it is of another model" in capsys.readouterr().err


def run(*words: str, world: int) -> None:
    port = find_free_port()
    script = PROGRAMS / "engines/deepspeed_checkpoints.py"
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **{"PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": str(world)},
                **{"LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"},
                "DS_ACCELERATOR": "cpu",
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


@pytest.mark.long
@pytest.mark.slow
def test_deepspeed_and_ours_have_the_same_logits(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    theirs, again = tmp_path / "theirs", tmp_path / "again"
    run("save", str(theirs), world=2)
    assert main(["import", str(theirs), str(tmp_path / "ckpt")]) == 0
    words = ["export", str(tmp_path / "ckpt"), str(again), "--deepspeed", str(theirs)]
    assert main(words) == 0
    run("load", str(theirs), str(again), world=1)
    ours = load_ours(tmp_path / "ckpt")
    for folder in (theirs, again):
        found = torch.load(folder / "logits.pt")
        torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5)

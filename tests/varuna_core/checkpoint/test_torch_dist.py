"""Megatron-LM's distributed checkpoints to ours and back, bit for bit, and none of them runs.

test_megatron.py asks megatron-core itself.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tests.varuna_core.checkpoint.test_huggingface import HEADS, build, save
from tests.varuna_core.checkpoint.test_megatron import USER, Trap, is_same, read
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.foreign.distcp import FILE, METADATA, list_stored, write_stored
from varuna_core.checkpoint.foreign.megatron import (
    COMMON,
    COMMON_STATE,
    FORMAT,
    export_torch_dist,
    import_megatron,
)
from varuna_core.checkpoint.format.box import Box
from varuna_core.checkpoint.format.entries import make_entry
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint
from varuna_core.checkpoint.format.manifest import WEIGHT
from varuna_core.checkpoint.store.reader import CheckpointReader

Tensors = Mapping[str, Tensor]
OURS = build("pretrain_gpt")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The folder of an iteration, of `OURS`."""
    return export_torch_dist(save(OURS, tmp_path / "ckpt", USER), tmp_path / "theirs")


def rename(folder: Path, alter: Callable[[dict[str, Tensor]], Tensors]) -> None:
    """Other tensors in the same folder."""
    held = {name: one.read() for name, one in list_stored(folder, lambda _: True).items()}
    for name in (FILE, METADATA):
        (folder / name).unlink()
    write_stored(folder, [make_entry(WEIGHT, n, t) for n, t in alter(held).items()], ["rng/shard"])


def change(folder: Path, alter: Callable[[Any], object]) -> None:
    """Another `.metadata`."""
    held = pickle.loads((folder / METADATA).read_bytes())
    alter(held)
    (folder / METADATA).write_bytes(pickle.dumps(held))


def change_common(folder: Path, **changed: Any) -> None:
    held = torch.load(folder / COMMON, weights_only=False)
    vars(held["args"]).update(changed)
    torch.save(held, folder / COMMON)


def move_common(folder: Path, **changed: Any) -> None:
    """Write the arguments among the pieces, as Core 0.19 does."""
    held = torch.load(folder / COMMON, weights_only=False)
    vars(held["args"]).update(changed)
    (folder / COMMON).unlink()
    with (folder / FILE).open("ab") as file:
        start = file.tell()
        torch.save([held], file)
        info = _StorageInfo(FILE, start, file.tell() - start)

    def add(metadata: Metadata) -> None:
        metadata.state_dict_metadata[COMMON_STATE] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(COMMON_STATE)] = info

    change(folder, add)


def test_there_and_back_the_weights_are_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(OURS, tmp_path / "ckpt", USER)
    words = ["export", "--torch-dist", str(tmp_path / "ckpt"), str(tmp_path / "theirs")]
    assert main([*words, "--vocab", "64"]) == 0
    into = str(tmp_path / "again")
    assert main(["import", str(tmp_path / "theirs"), into, "--vocab", "50"]) == 0
    assert "imported the weights of" in capsys.readouterr().out
    assert is_same(read(tmp_path / "again"), OURS)
    with CheckpointReader.open(tmp_path / "again") as reader:
        assert reader.state.user["model"] == {"heads": HEADS}


def number_layers(held: dict[str, Tensor]) -> Tensors:
    """As models whose layers differ, and all of later releases, are saved."""
    made = {}
    for name, tensor in held.items():
        if ".layers." in name:
            for number, one in enumerate(tensor):
                made[name.replace(".layers.", f".layers.{number}.")] = one.clone()
        else:
            made[name] = tensor
    return made


def keep_norms_apart(held: dict[str, Tensor]) -> Tensors:
    parts = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    made = {}
    for name, tensor in held.items():
        for fused, apart in parts.items():
            name = name.replace(fused, apart)
        made[name] = tensor
    return made


def add_state(held: dict[str, Tensor]) -> Tensors:
    """The optimizer's, and the output layer of a model that ties it."""
    state = {
        f"{prefix}.state.exp_avg.{name}": tensor
        for prefix in ("optimizer", "chained_0.optimizer")
        for name, tensor in held.items()
    }
    return {**state, **held, "output_layer.weight": held["embedding.word_embeddings.weight"]}


def wrap(held: dict[str, Tensor]) -> Tensors:
    return {f"module.{name}": tensor for name, tensor in held.items()}


@pytest.mark.parametrize("alter", [number_layers, keep_norms_apart, add_state, wrap])
def test_other_names_of_the_same_model_are_read(
    theirs: Path, tmp_path: Path, alter: Callable[[dict[str, Tensor]], Tensors]
) -> None:
    rename(theirs, alter)
    import_megatron(theirs, tmp_path / "again")
    assert is_same(read(tmp_path / "again"), OURS)


def test_pieces_in_both_dimensions_make_up_a_tensor(tmp_path: Path) -> None:
    wanted = torch.arange(60.0).view(6, 10)
    boxes = [Box((0, 0), (4, 3)), Box((0, 3), (4, 7)), Box((4, 0), (2, 10))]
    write_stored(
        tmp_path,
        [make_entry(WEIGHT, "w", wanted[box.slices], box, (6, 10)) for box in boxes],
        [],
    )
    stored = list_stored(tmp_path, lambda _: True)["w"]
    assert torch.equal(stored.read(), wanted)
    part = Box((3, 2), (2, 5))
    assert torch.equal(stored.read(part), wanted[part.slices])


@pytest.mark.filterwarnings("ignore")  # of torch.distributed.checkpoint's own
def test_torch_reads_what_we_write_and_we_what_it_writes(theirs: Path, tmp_path: Path) -> None:
    held = {name: one.read() for name, one in list_stored(theirs, lambda _: True).items()}
    assert len(held) == 4 + 12
    found = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    dcp.load(found, checkpoint_id=theirs, no_dist=True)
    assert all(torch.equal(found[name], held[name]) for name in held)
    held |= {"half": torch.ones(3, dtype=torch.bfloat16), "one": torch.tensor(4), "step": 3}
    dcp.save(held, checkpoint_id=tmp_path / "torch", no_dist=True)
    stored = list_stored(tmp_path / "torch", lambda name: name != "step")
    assert stored.keys() == held.keys() - {"step"}
    assert all(torch.equal(one.read(), held[name]) for name, one in stored.items())


def add(name: str, *shape: int) -> Callable[[dict[str, Tensor]], Tensors]:
    return lambda held: {**held, name: torch.ones(shape)}


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (add("decoder.layers.mlp.router.weight", 3, 4, 16), r"is of a mixture of experts: it has"),
        (add("decoder.layers.mlp.experts.experts.linear_fc1.weight", 3, 4), r"mixture of experts"),
        (add("embedding.tokentype_embeddings.weight", 2, 16), r"is of BERT: it has 'embedding"),
        (add("decoder.layers.0.mlp.linear_fc1.bias", 64), r"blocks.0.mlp.inner.bias twice"),
        (add("output_layer.weight", 50, 16), r"word embedding are not tied"),
        (lambda held: dict(list(held.items())[:-1]), r"has no norm.bias"),
    ],
)
def test_another_model_is_refused_with_what_differs(
    theirs: Path, tmp_path: Path, alter: Callable[[dict[str, Tensor]], Tensors], message: str
) -> None:
    rename(theirs, alter)
    with pytest.raises(CheckpointError, match=message):
        import_megatron(theirs, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_its_arguments_and_format_say_is_checked(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(theirs), str(tmp_path / "again")]
    change_common(theirs, num_experts=8, untie_embeddings_and_output_weights=True)
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "num_experts 8" in told and "untie_embeddings_and_output_weights True" in told
    torch.save({"iteration": 3}, theirs / COMMON)
    assert main(words) == 1
    assert "does not record the model's number of attention heads" in capsys.readouterr().err
    assert main([*words, "--heads", "4"]) == 0
    assert "no arguments are stored" in capsys.readouterr().out
    (theirs / FORMAT).write_text(json.dumps({"sharded_backend": "zarr"}))
    assert main(words) == 1
    assert "has the format 'zarr', which is not supported" in capsys.readouterr().err
    for name in (COMMON, FORMAT):
        (theirs / name).unlink()
    assert main([*words[:2], str(theirs.parent / "plain")]) == 0, "a plain one"


def lose_a_place(held: Any) -> None:
    lost = next(index for index in held.storage_data if index.fqn.endswith("fc1.bias"))
    del held.storage_data[lost]


def lose_a_piece(held: Any) -> None:
    held.state_dict_metadata["decoder.layers.mlp.linear_fc1.bias"].chunks.pop()


def go_outside(held: Any) -> None:
    for index, info in held.storage_data.items():
        held.storage_data[index] = replace(info, relative_path="../common.pt")


def compress(held: Any) -> None:
    for index, info in held.storage_data.items():
        held.storage_data[index] = replace(info, transform_descriptors=["zstd"])


def swap_places(held: Any) -> None:
    places = [i for i in held.storage_data if not i.fqn.endswith(("/shard", "qkv.bias"))][:2]
    one, other = (held.storage_data[index] for index in places)
    held.storage_data.update(dict(zip(places, (other, one), strict=True)))


def promise_more(held: Any) -> None:
    one = held.state_dict_metadata["decoder.final_layernorm.bias"]
    one.size = one.chunks[0].sizes = torch.Size([1 << 50])


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lose_a_place, r"gives no file for decoder.layers.mlp.linear_fc1.bias"),
        (lose_a_piece, r"linear_fc1.bias is not whole: 64 of its 192 elements were written by"),
        (go_outside, r"'../common.pt', outside the checkpoint's folder"),
        (compress, r"is compressed, which is not supported"),
        (swap_places, r"bytes cannot hold|is not the torch.float32 of"),
        (promise_more, r"bytes cannot hold decoder.final_layernorm.bias"),
        (lambda held: held.state_dict_metadata.clear(), r"has no word embedding"),
        (lambda held: delattr(held, "storage_data"), r"not a checkpoint of torch.distributed"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    theirs: Path, tmp_path: Path, alter: Callable[[Any], object], message: str
) -> None:
    change(theirs, alter)
    with pytest.raises(CheckpointError, match=message):
        import_megatron(theirs, tmp_path / "again")


def test_what_is_missing_or_torn_is_named(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(tmp_path / "theirs"), str(tmp_path / "again")]
    whole = {name: (theirs / name).read_bytes() for name in (FILE, METADATA, COMMON)}
    # A cut file, and one of other bytes: the sizes fit, and what torch.save wrote is not there.
    for name, held, message in (
        (FILE, whole[FILE][:-20000], f"{FILE} is truncated: it has"),
        (FILE, bytes(len(whole[FILE])), f"{FILE}: embedding.word_embeddings.weight is damaged"),
        (FILE, None, f"{FILE} is missing: "),
        (METADATA, whole[METADATA][:900], f"{METADATA} is not a complete pickle"),
        (METADATA, None, f"{METADATA} is missing"),
        (COMMON, whole[COMMON][:100], f"{COMMON} is not a complete torch.save file"),
        (COMMON, None, f"{COMMON} is missing"),
    ):
        (theirs / name).unlink()
        if held is not None:
            (theirs / name).write_bytes(held)
        assert main(words) == 1, message
        assert f"{theirs}/{message}" in capsys.readouterr().err
        (theirs / name).write_bytes(whole[name])
    assert main(words) == 0


def test_any_cut_of_the_metadata_is_an_error_of_ours(theirs: Path) -> None:
    held = (theirs / METADATA).read_bytes()
    for end in range(0, len(held), 97):
        (theirs / METADATA).write_bytes(held[:end])
        with pytest.raises(DamagedCheckpoint):
            list_stored(theirs, lambda _: True)
    for at in range(0, len(held), 61):
        (theirs / METADATA).write_bytes(held[:at] + bytes([held[at] ^ 0x15]) + held[at + 1 :])
        try:
            list_stored(theirs, lambda _: True)
        except CheckpointError:
            continue


def test_nothing_of_its_pickles_runs(theirs: Path, tmp_path: Path) -> None:
    trap = Trap(str(tmp_path / "trapped"))
    change_common(theirs, trap=trap)
    import_megatron(theirs, tmp_path / "again")
    assert is_same(read(tmp_path / "again"), OURS)

    change(theirs, lambda held: setattr(held, "planner_data", trap))
    with pytest.raises(CheckpointError, match=r"\.metadata is not read: .* would run posix\.mkdir"):
        import_megatron(theirs, tmp_path / "more")
    assert not Path(trap.path).exists()


def test_the_arguments_are_read_among_the_pieces(theirs: Path, tmp_path: Path) -> None:
    trap = Trap(str(tmp_path / "trapped"))
    move_common(theirs, trap=trap)
    import_megatron(theirs, tmp_path / "again")
    assert is_same(read(tmp_path / "again"), OURS)
    with CheckpointReader.open(tmp_path / "again") as reader:
        assert reader.state.user["model"] == {"heads": HEADS}
    assert not Path(trap.path).exists()
    held = (theirs / FILE).read_bytes()
    (theirs / FILE).write_bytes(held[:-100])
    with pytest.raises(DamagedCheckpoint, match=r"is not a complete torch\.save file"):
        import_megatron(theirs, tmp_path / "more")
    (theirs / FILE).unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"{FILE} is missing: it holds common_state"):
        import_megatron(theirs, tmp_path / "more")


def test_a_piece_that_is_more_than_a_tensor_is_refused(theirs: Path, tmp_path: Path) -> None:
    trap = Trap(str(tmp_path / "trapped"))
    content = tmp_path / "piece"
    torch.save(trap, content)
    held = (theirs / FILE).read_bytes()
    (theirs / FILE).write_bytes(held + content.read_bytes())

    def point_there(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "embedding.position_embeddings.weight":
                place = replace(info, offset=len(held), length=content.stat().st_size)
                metadata.storage_data[index] = place

    change(theirs, point_there)
    with pytest.raises(CheckpointError, match=r"position_embeddings.weight .* call posix\.mkdir"):
        import_megatron(theirs, tmp_path / "again")
    assert not Path(trap.path).exists()

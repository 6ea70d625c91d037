"""Safetensors files read lazily; damaged ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from varuna_core.checkpoint.foreign.weight_files import WeightFileError, open_weights
from varuna_core.checkpoint.format.entries import DTYPES


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """The format by hand, so that the tests need no library."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    words = {dtype: word for word, dtype in DTYPES.items()}
    content = b""
    for name, tensor in tensors.items():
        flat = tensor.contiguous().reshape(-1)
        data = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
        header[name] = {
            "dtype": words[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(content), len(content) + len(data)],
        }
        content += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def test_tensors_of_every_type_and_shape_are_read(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES.values()}
    tensors |= {"number": torch.tensor(3.0), "empty": torch.ones(0, 4)}
    write(tmp_path / "a.safetensors", tensors)
    write(tmp_path / "b.safetensors", {"other": torch.arange(3)})
    stored = open_weights(tmp_path)
    assert set(stored) == {*tensors, "other"} and len(stored) == len(tensors) + 1
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype and stored[name].shape == tensor.shape
        assert stored[name].tolist() == tensor.tolist(), name
    stored["other"].add_(1)
    assert torch.equal(stored["other"], torch.arange(3))


def test_files_of_the_library_itself_are_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    tensors = {"a.weight": torch.randn(3, 4), "b": torch.arange(5).to(torch.bfloat16)}
    library.save_file(tensors, tmp_path / "x.safetensors")
    stored = open_weights(tmp_path / "x.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"no \*.safetensors in this folder"):
        open_weights(tmp_path)
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", {"x": torch.ones(1)})
    with pytest.raises(WeightFileError, match=r"'x' is in .*a\.safetensors and in .*b\."):
        open_weights(tmp_path)


def write_sharded(folder: Path, **files: dict[str, Tensor]) -> None:
    """As Hugging Face saves a large model."""
    listed = {}
    for word, tensors in files.items():
        write(folder / f"{word}.safetensors", tensors)
        listed |= dict.fromkeys(tensors, f"{word}.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_of_a_folder_with_an_index_its_files_alone_are_read(tmp_path: Path) -> None:
    write_sharded(tmp_path, one={"x": torch.ones(2)}, two={"y": torch.zeros(3)})
    write(tmp_path / "consolidated.safetensors", {"x": torch.zeros(5), "z": torch.zeros(5)})
    stored = open_weights(tmp_path)
    assert set(stored) == {"x", "y"} and stored["x"].tolist() == [1, 1]
    assert stored.shape_of("y") == (3,)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(WeightFileError, match=r"two.safetensors is missing, but model.*lists it"):
        open_weights(tmp_path)
    write(tmp_path / "two.safetensors", {"other": torch.zeros(3)})
    with pytest.raises(WeightFileError, match=r"two.safetensors lacks 'y'"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(WeightFileError, match="not an index of safetensors files"):
        open_weights(tmp_path)


def test_of_a_folder_with_one_model_file_that_one_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"x": torch.ones(2)})
    write(tmp_path / "adapter_model.safetensors", {"x": torch.zeros(2)})
    assert open_weights(tmp_path)["x"].tolist() == [1, 1]


def test_a_folder_of_other_files_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        WeightFileError, match=r"no \*.safetensors .* it has pytorch_model.bin: load"
    ):
        open_weights(tmp_path)


def test_a_file_that_shrinks_meanwhile_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"x": torch.ones(9)})
    stored = open_weights(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightFileError, match="ends within 'x'"):
        stored["x"]


def test_negative_sizes_that_multiply_to_the_right_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"x": torch.ones(2, 2)})
    content = path.read_bytes()[8:].replace(b"[2, 2]", b"[-2, -2]")
    path.write_bytes((len(content) - 16).to_bytes(8, "little") + content)
    with pytest.raises(WeightFileError, match="'x' does not fit"):
        open_weights(path)


@given(st.data())
def test_a_damaged_file_is_refused_or_read_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    write(path, {"x": torch.arange(4), "y": torch.ones(2)})
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        for tensor in open_weights(path).values():
            assert tensor.numel() <= 48
    except WeightFileError as error:
        assert str(path) in str(error)

"""Boxes, the tensor files and small state: what the rest of the checkpoints stands on."""

from __future__ import annotations

import json
import random
import runpy
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from tests import ROOT
from varuna_core.checkpoint.format import box as boxes
from varuna_core.checkpoint.format import document
from varuna_core.checkpoint.format.box import Box, find_fault, list_blocks, split_range, whole
from varuna_core.checkpoint.format.entries import DTYPES, deal, make_entry, write_file
from varuna_core.checkpoint.format.errors import DamagedCheckpoint
from varuna_core.checkpoint.format.plain import from_plain, to_plain
from varuna_core.checkpoint.format.tensorfile import ITEM_BYTES, read_head
from varuna_core.checkpoint.store.torch_state import put_random_state, take_random_state

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@pytest.mark.parametrize("without_isal", [False, True])
def test_a_checksum_is_zlibs_with_isal_and_without(
    without_isal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_isal:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    found = runpy.run_path(document.__file__)
    assert ("isal" in found["crc32"].__module__) != without_isal
    data = random.Random(3).randbytes(300_000)
    for size in (0, 1, 15, 4096, 300_000):
        assert found["crc_text"](memoryview(data)[:size]) == f"{zlib.crc32(data[:size]):08x}"


@given(shapes, st.data())
def test_a_run_of_elements_is_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    held = torch.arange(count).reshape(shape)
    parts = [held[box.slices].flatten() for box in split_range(shape, start, stop)]
    assert torch.equal(
        torch.cat([torch.empty(0, dtype=torch.int64), *parts]), held.flatten()[start:stop]
    )
    assert len(parts) <= max(1, 2 * len(shape))


@given(shapes, st.lists(st.integers(0, 2000), max_size=4), st.data())
def test_pieces_that_make_up_a_tensor_are_accepted_and_no_others(
    shape: tuple[int, ...], cuts: list[int], data: st.DataObject
) -> None:
    count = prod(shape)
    places = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    parts = [box for start, stop in pairwise(places) for box in split_range(shape, start, stop)]
    data.draw(st.randoms()).shuffle(parts)
    assert find_fault(shape, parts) is None
    assert find_fault(shape, parts[1:]) is not None
    assert find_fault(shape, [*parts, parts[0]]) is not None
    if shape:
        outside = Box(shape, parts[0].extent)
        assert find_fault(shape, [*parts[1:], outside]) is not None


@given(shapes, st.integers(1, 9))
def test_blocks_make_up_a_piece(extent: tuple[int, ...], rows: int) -> None:
    assert find_fault(extent, list_blocks(extent, rows)) is None


@given(
    st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES))), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_replicas_deal_out_every_element_once_in_shares_of_equal_bytes(
    tensors: list[tuple[tuple[int, ...], str]], num_shares: int
) -> None:
    segments: dict[int, list[Any]] = {}
    for number, (shape, dtype) in enumerate(tensors):
        entry = make_entry("weight", str(number), torch.zeros(shape, dtype=DTYPES[dtype]))
        segments.setdefault(number // 2, []).append(entry)
    shares = [deal(segments, num_shares, share) for share in range(num_shares)]
    for number, (shape, _) in enumerate(tensors):
        parts = [e for s in shares for held in s.values() for e in held if e.name == str(number)]
        assert find_fault(shape, [part.box for part in parts]) is None
        assert all(part.load().shape == part.box.extent for part in parts)
    sizes = [sum(e.num_bytes for held in s.values() for e in held) for s in shares]
    assert max(sizes) - min(sizes) <= 16


def test_a_sparse_buffer_is_refused_with_a_remedy() -> None:
    with pytest.raises(TypeError, match=r"buffer 'heads' is not a plain.*persistent=False"):
        make_entry("buffer", "heads", torch.eye(3).to_sparse())


@pytest.mark.parametrize("word", sorted(DTYPES))
def test_the_library_reads_our_files_and_we_read_its(word: str, tmp_path: Path) -> None:
    dtype = DTYPES[word]
    held = {
        "a/b.c": torch.randint(0, 2, (3, 5)).to(dtype),
        "wide": torch.randint(0, 2, (5, 4)).to(dtype).t(),
        "none": torch.zeros((0, 3), dtype=dtype),
        "one": torch.ones((), dtype=dtype),
        "other": torch.randn(7, dtype=torch.float64),
    }
    with ThreadPoolExecutor(1) as beside:
        entries = [make_entry("weight", name, tensor) for name, tensor in held.items()]
        write_file(tmp_path / "ours", entries, {"iteration": "7"}, beside).result()
    with safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "iteration": "7"}
        for name, tensor in held.items():
            found = opened.get_tensor(name)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert found.tolist() == tensor.tolist()
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, tmp_path / "theirs")
    _, laid = read_head(tmp_path / "theirs")
    data = (tmp_path / "theirs").read_bytes()
    for one in laid:
        assert one.extent == tuple(held[one.key].shape) and DTYPES[one.dtype] == held[one.key].dtype
        raw = held[one.key].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert data[one.start : one.start + one.num_bytes] == raw


def test_every_type_has_its_size() -> None:
    assert {word: dtype.itemsize for word, dtype in DTYPES.items()} == ITEM_BYTES


@given(st.binary(max_size=200))
def test_a_foreign_file_is_no_tensor_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        try:
            head, laid = read_head(path)
        except DamagedCheckpoint as error:
            assert str(path) in str(error)
        else:
            assert json.loads(head[8:]) is not None and all(one.num_bytes >= 0 for one in laid)


small = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("!"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(small)
def test_small_state_comes_back_as_it_was(value: Any) -> None:
    back = from_plain(json.loads(json.dumps(to_plain(value, "user"))))
    assert back == value and repr(back) == repr(value)


def test_small_state_of_schedulers_numpy_and_tensors_comes_back() -> None:
    value = {"milestones": Counter({3: 1, 9: 2}), "lr": torch.tensor(0.5, dtype=torch.bfloat16)}
    back = from_plain(json.loads(json.dumps(to_plain(value, "user"))))
    assert type(back["milestones"]) is Counter and back == value
    assert back["lr"].dtype == torch.bfloat16
    assert to_plain(np.float32(0.5), "user") == 0.5 and to_plain(np.int64(3), "user") == 3


def test_what_json_cannot_hold_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"user/net/1 is a Linear, which a checkpoint cannot hold"):
        to_plain({"net": [1, torch.nn.Linear(1, 1)]}, "user")
    with pytest.raises(TypeError, match=r"user/big is a tensor of \[1000, 1000\]: too large"):
        to_plain({"big": torch.zeros(1000, 1000)}, "user")


def test_random_generators_go_on_where_they_were() -> None:
    taken = json.loads(json.dumps(to_plain(take_random_state(), "own")))
    drawn = random.random(), np.random.random(), torch.rand(3).tolist()
    put_random_state(from_plain(taken))
    assert (random.random(), np.random.random(), torch.rand(3).tolist()) == drawn


def test_the_lower_parts_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from varuna_core.checkpoint.format import box, document, manifest, tensorfile\n"
        "from varuna_core.checkpoint.store import store\n"
        "from varuna_core.checkpoint.cli import main\n"
        "main(['inspect', '/nonexistent'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_large_tensor_has_a_checksum_for_each_mebibyte() -> None:
    assert boxes.count_block_rows((100_000, 1000), 4) == 262
    assert boxes.count_block_rows((2, 10_000_000), 4) == 1
    assert whole((3, 4)).slices == (slice(0, 3), slice(0, 4))

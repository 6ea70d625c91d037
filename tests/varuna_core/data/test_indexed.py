"""The .bin/.idx pair: the bytes of megatron-core's, and a clear word for each kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.data.tokens import write_tokens
from varuna_core.data.errors import DataError
from varuna_core.data.indexed import choose_dtype, open_tokens

texts = st.lists(
    st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=4), min_size=1, max_size=6
)


@settings(deadline=None)
@given(documents=texts)
def test_what_is_written_is_read(documents: list[list[list[int]]]) -> None:
    with TemporaryDirectory() as name:
        tokens = write_tokens(Path(name) / "a", documents)
        assert tokens.num_documents == len(documents)
        found = [
            [tokens.read(i).tolist() for i in range(begin, end)]
            for begin, end in zip(tokens.documents, tokens.documents[1:], strict=False)
        ]
    assert found == documents


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint8", "int64"])
def test_files_are_those_of_megatron_core_byte_by_byte(
    megatron: Any, tmp_path: Path, dtype: str
) -> None:
    import torch

    random = np.random.default_rng(1)
    documents = [
        [random.integers(0, 200, size=random.integers(0, 9)).tolist() for _ in range(n)]
        for n in (1, 3, 0, 2, 1)
    ]
    write_tokens(tmp_path / "ours", documents, dtype)
    builder = megatron.indexed.IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=getattr(np, dtype)
    )
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours.{kind}").read_bytes() == (
            tmp_path / f"theirs.{kind}"
        ).read_bytes()
    theirs = megatron.indexed.IndexedDataset(str(tmp_path / "ours"))
    ours = open_tokens(tmp_path / "theirs")
    flat = [sequence for document in documents for sequence in document]
    assert [theirs[i].tolist() for i in range(len(theirs))] == flat
    assert [ours.read(i).tolist() for i in range(ours.num_sequences)] == flat


def test_the_token_type_is_megatrons(tmp_path: Path) -> None:
    assert choose_dtype(65499) == np.uint16 and choose_dtype(65500) == np.int32


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]])
    return tmp_path / "a"


def change(path: Path, **at: Any) -> None:
    """Put bytes into the index: at_9=b'..' is at byte 9."""
    data = bytearray(path.read_bytes())
    for place, new in at.items():
        begin = int(place.removeprefix("at_"))
        data[begin : begin + len(new)] = new
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("place", "new", "says"),
    [
        ("at_0", b"TNTIDX\0\0\x01", "lazy/cached"),
        ("at_0", b"something", "not a token index"),
        ("at_9", struct.pack("<Q", 2), "has version 2"),
        ("at_17", b"\x07", "floating point"),
        ("at_17", b"\x63", "unknown code 99"),
        ("at_18", struct.pack("<Q", 7), "cut short"),
        ("at_34", struct.pack("<i", -1), "impossible lengths"),
        ("at_42", struct.pack("<q", 3), "impossible lengths or offsets"),
        ("at_58", struct.pack("<q", 1), "do not cover"),
        ("at_66", struct.pack("<q", 5), "out of order"),
        ("at_34", struct.pack("<i", 9), "a.bin is cut short: a.idx needs 18 bytes"),
    ],
)
def test_a_damaged_or_foreign_index_is_named(pair: Path, place: str, new: bytes, says: str) -> None:
    path = pair.with_suffix(".idx")
    change(path, **{place: new})
    with pytest.raises(DataError, match=says) as caught:
        open_tokens(pair)
    assert str(pair) in str(caught.value)


def test_every_truncation_is_refused(pair: Path) -> None:
    """Whatever is left of either file, it is not read as if it were whole."""
    for suffix in (".idx", ".bin"):
        path = pair.with_suffix(suffix)
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=r"cut short|not a token index"):
                open_tokens(pair)
        path.write_bytes(whole)
    open_tokens(pair)


def test_a_prefix_with_its_suffix_or_without_files_says_what_to_give(pair: Path) -> None:
    with pytest.raises(DataError, match=r"without \.bin or \.idx"):
        open_tokens(f"{pair}.bin")
    with pytest.raises(DataError, match="vjob data prepare"):
        open_tokens(pair.with_name("b"))

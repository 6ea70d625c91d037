"""Index maps: megatron-core's arrays, a plain reading of the rules, and maps of other data."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.data.tokens import lengths_of_documents, write_counting
from varuna_core.data.errors import DataError
from varuna_core.data.gpt import GptSamples, open_gpt
from varuna_core.data.index_maps import (
    build_maps,
    count_epochs,
    find_fault,
    load_or_build,
    name_maps,
)

cases = {
    "lengths": lengths_of_documents,
    "num_samples": st.integers(1, 60),
    "sequence": st.integers(1, 9),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(deadline=None)
@given(**cases)
def test_maps_are_those_of_megatron_core(
    megatron: Any, lengths: list[int], num_samples: int, sequence: int, seed: int
) -> None:
    """Its functions, called in the order and with the arguments of its GPTDataset."""
    sizes = np.array(lengths, np.int32)
    documents = range(len(sizes))
    ours = build_maps(sizes, documents, num_samples=num_samples, sequence=sequence, seed=seed)
    epochs = count_epochs(int(sizes.sum()), num_samples, sequence)
    random = np.random.RandomState(seed)
    is_apart = epochs.num_before_last is not None
    document = megatron.gpt._build_document_index(
        np.array(documents), epochs.count, random, is_apart
    )
    sample = megatron.helpers.build_sample_idx(
        sizes, document, sequence, epochs.count, int(sizes.sum())
    )
    total = len(sample) - 1
    shuffle = megatron.gpt._build_shuffle_index(
        epochs.num_before_last if is_apart else total, total, random
    )
    for name, theirs in (("document", document), ("sample", sample), ("shuffle", shuffle)):
        mine = getattr(ours, name)
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), name


@pytest.mark.parametrize("num_samples", [5, 40, 41, 73, 80, 200])
def test_samples_are_those_of_megatron_cores_data_set(
    megatron: Any, tmp_path: Path, num_samples: int
) -> None:
    """The whole class, so that epochs and the last epoch's rule are its own."""
    lengths = [0, 7, 30, 1, 0, 64, 5, 200, 12, 3]
    tokens = write_counting(tmp_path / "a", lengths)
    config = megatron.gpt.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=8,
        blend=([str(tmp_path / "a")], None),
        split="1",
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=70000, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    theirs = megatron.gpt.GPTDataset(
        megatron.indexed.IndexedDataset(str(tmp_path / "a")),
        str(tmp_path / "a"),
        np.arange(len(lengths), dtype=np.int32),
        num_samples,
        megatron.utils.Split.train,
        config,
    )
    ours = GptSamples(
        tokens, "train", range(len(lengths)), num_samples=num_samples, sequence=8, seed=1234
    )
    assert len(ours) == len(theirs)
    for number in range(len(ours)):
        text, _ = theirs._query_document_sample_shuffle_indices(number)
        assert np.array_equal(ours.read(number), text), number


def walk(
    lengths: list[int], num_samples: int, sequence: int, seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """The rules as their first authors wrote them down, one token at a time."""
    total, epochs = 0, 0
    while True:
        epochs += 1
        total += sum(lengths)
        if (total - 1) // sequence >= num_samples:
            break
    apart = False
    before = 0
    if epochs > 1:
        before = ((epochs - 1) * sum(lengths) - 1) // sequence
        apart = num_samples - before < int(0.80 * ((sum(lengths) - 1) // sequence))
    random = np.random.RandomState(seed)
    order: list[int] = []
    for count in (epochs - 1, 1) if apart else (epochs,):
        part = np.array(list(range(len(lengths))) * count, np.int32)
        random.shuffle(part)
        order += part.tolist()
    places = [(i, t) for i, document in enumerate(order) for t in range(lengths[document])]
    rows = [(0, 0), *places[sequence : total - 1 + 1 : sequence]]
    rows = rows[: (total - 1) // sequence + 1]
    num_rows = (total - 1) // sequence
    shuffle: list[int] = []
    for part in (
        (np.arange(before), np.arange(before, num_rows)) if apart else (np.arange(num_rows),)
    ):
        random.shuffle(part)
        shuffle += part.tolist()
    return order, rows, shuffle


@settings(deadline=None)
@given(**cases)
def test_maps_follow_the_rules_of_2023_walked_token_by_token(
    lengths: list[int], num_samples: int, sequence: int, seed: int
) -> None:
    sizes = np.array(lengths, np.int32)
    documents = range(len(sizes))
    ours = build_maps(sizes, documents, num_samples=num_samples, sequence=sequence, seed=seed)
    order, rows, shuffle = walk(lengths, num_samples, sequence, seed)
    assert ours.document.tolist() == order
    assert [tuple(row) for row in ours.sample.tolist()] == rows
    assert ours.shuffle.tolist() == shuffle
    assert ours.num_samples >= num_samples


@settings(deadline=None)
@given(**cases)
def test_samples_of_an_epoch_are_its_tokens_end_to_end(
    lengths: list[int], num_samples: int, sequence: int, seed: int
) -> None:
    """Unshuffled, each begins with the last token of the one before."""
    with TemporaryDirectory() as name:
        tokens = write_counting(Path(name) / "a", lengths)
        samples = GptSamples(
            tokens, "train", range(len(lengths)), num_samples=num_samples, sequence=sequence,
            seed=seed, may_write=False,
        )  # fmt: skip
        place = np.argsort(samples.maps.shuffle)
        rows = samples.read_batch(place.tolist())
        text = np.concatenate([tokens.read(int(d)) for d in samples.maps.document])
    for k, row in enumerate(rows):
        assert np.array_equal(row, text[k * sequence : (k + 1) * sequence + 1])


def test_the_files_have_the_names_of_2023_and_are_found_again(tmp_path: Path) -> None:
    prefix = tmp_path / "my-gpt2_text_document"
    write_counting(prefix, [300] * 40)
    wanted = {"train": 1600, "valid": 8}
    first = open_gpt(str(prefix), split="969,30,1", num_samples=wanted, sequence=1024, seed=1234)
    names = {path.name for path in tmp_path.glob("*.npy")}
    assert names == {
        f"my-gpt2_text_document_{part}_indexmap_{count}ns_1024sl_1234s_{kind}_idx.npy"
        for part, count in wanted.items()
        for kind in ("doc", "sample", "shuffle")
    }
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")}
    again = open_gpt(str(prefix), split="969,30,1", num_samples=wanted, sequence=1024, seed=1234)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")} == times
    assert np.array_equal(first["train"].read(5), again["train"].read(5))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_maps_that_are_there_are_used_whoever_shuffled_them(tmp_path: Path) -> None:
    lengths = np.full(6, 10, np.int32)
    documents = range(6)
    theirs = build_maps(lengths, documents, num_samples=11, sequence=4, seed=99)
    paths = name_maps(str(tmp_path / "a"), "train", num_samples=11, sequence=4, seed=1)
    for path, array in zip(paths, (theirs.document, theirs.sample, theirs.shuffle), strict=True):
        np.save(path, array)
    found = load_or_build(
        str(tmp_path / "a"), "train", lengths, range(6), num_samples=11, sequence=4, seed=1
    )
    assert np.array_equal(found.shuffle, theirs.shuffle)


@settings(deadline=None)
@given(**cases, data=st.data())
def test_maps_of_other_data_are_refused(
    lengths: list[int], num_samples: int, sequence: int, seed: int, data: st.DataObject
) -> None:
    """Unless as many documents, shuffled so, are cut at the same places."""
    sizes = np.array(lengths, np.int32)
    documents = range(len(sizes))
    settings = {"num_samples": num_samples, "sequence": sequence}
    ours = build_maps(sizes, documents, seed=seed, **settings)
    assert find_fault(ours, sizes, documents, **settings) == ""
    other = np.array(data.draw(lengths_of_documents), np.int32)
    numbers = range(len(other))
    fault = find_fault(ours, other, numbers, **settings)
    starts = np.concatenate(([0], np.cumsum(sizes[ours.document])))
    if len(other) == len(sizes) and not fault:
        others = np.concatenate(([0], np.cumsum(other[ours.document])))
        used = ours.sample[:, 0]
        assert np.array_equal(starts[used], others[used])
    else:
        assert fault


@pytest.mark.parametrize("kind", ["doc_idx", "sample_idx", "shuffle_idx"])
def test_one_changed_entry_is_refused_and_the_file_named(tmp_path: Path, kind: str) -> None:
    prefix = tmp_path / "a"
    write_counting(prefix, [50, 3, 20])
    open_gpt(str(prefix), split="1", num_samples={"train": 9}, sequence=4, seed=1)
    path = tmp_path / f"a_train_indexmap_9ns_4sl_1s_{kind}.npy"
    array = np.load(path)
    array[1] = array[0]
    np.save(path, array)
    with pytest.raises(DataError, match=r"not the index maps of .*Remove"):
        open_gpt(str(prefix), split="1", num_samples={"train": 9}, sequence=4, seed=1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=kind):
        open_gpt(str(prefix), split="1", num_samples={"train": 9}, sequence=4, seed=1)


def test_maps_with_objects_are_never_unpickled(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    write_counting(prefix, [50])
    for kind in ("doc_idx", "sample_idx", "shuffle_idx"):
        path = tmp_path / f"a_train_indexmap_9ns_4sl_1s_{kind}.npy"
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        open_gpt(str(prefix), split="1", num_samples={"train": 9}, sequence=4, seed=1)


def test_a_folder_that_takes_no_files_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = tmp_path / "a"
    write_counting(prefix, [50])

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("varuna_core.data.index_maps.np.save", refuse)
    samples = open_gpt(str(prefix), split="1", num_samples={"train": 9}, sequence=4, seed=1)
    assert len(samples["train"]) >= 9 and "No space left" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]

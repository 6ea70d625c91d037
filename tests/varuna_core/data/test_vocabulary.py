"""Encoders by units equal the tokenizers' own encoding of the whole, on any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus import make_documents, make_wordpiece_vocabulary
from varuna_core.data.errors import DataError
from varuna_core.data.vocabulary import (
    Encoder,
    UnitEncoder,
    VocabularyFiles,
    open_encoder,
    train_bpe,
    train_whitespace,
)

SPACES = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u3000\u200b\u180e"
# Words of the vocabulary, all kinds of spaces side by side, contractions, marks, accents, anything.
texts = st.lists(
    st.one_of(
        st.sampled_from(["ba", "Kilomu", "'s", "'ll", "12", "½", "é", "e\u0301", "中文", "\u0301"]),
        st.text(SPACES, max_size=4),
        st.text(max_size=4),
        st.sampled_from(["<|endoftext|>", "!?"]),
    ),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> UnitEncoder:
    folder = tmp_path_factory.mktemp("bpe")
    files = train_bpe([*make_documents(300), "it's 12 we'll中文 é"], 600, folder)
    encoder = open_encoder(files)
    assert isinstance(encoder, UnitEncoder)
    return encoder


@pytest.fixture(scope="session", params=["wordpiece-lower", "wordpiece-cased"])
def wordpiece(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> UnitEncoder:
    path = tmp_path_factory.mktemp("wordpiece") / "vocab.txt"
    path.write_text("\n".join([*make_wordpiece_vocabulary(), "é", "中", "Ba", "##½"]) + "\n")
    encoder = open_encoder(VocabularyFiles(kind=request.param, vocab=path))
    assert isinstance(encoder, UnitEncoder)
    return encoder


def check(encoder: UnitEncoder, listed: list[str]) -> None:
    found = encoder.encode(listed)
    for text, data in zip(listed, found, strict=True):
        whole = encoder.tokenizer.encode(text, add_special_tokens=False).ids
        assert np.frombuffer(data, encoder.dtype).tolist() == whole, text


@settings(max_examples=500, deadline=None)
@given(listed=st.lists(texts, max_size=4))
def test_bpe_by_units_is_bpe_of_the_whole(bpe: UnitEncoder, listed: list[str]) -> None:
    check(bpe, listed)


@settings(max_examples=500, deadline=None)
@given(listed=st.lists(texts, max_size=4))
def test_wordpiece_by_units_is_wordpiece_of_the_whole(
    wordpiece: UnitEncoder, listed: list[str]
) -> None:
    check(wordpiece, listed)


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_bpe_loses_nothing(bpe: UnitEncoder, text: str) -> None:
    (data,) = bpe.encode([text])
    assert bpe.decode(np.frombuffer(data, bpe.dtype).tolist()) == text


def test_bpe_is_that_of_transformers(bpe: UnitEncoder, tmp_path: Path) -> None:
    """Its GPT-2 tokenizer on the same files, as an independent reader of them."""
    transformers: Any = pytest.importorskip("transformers")
    vocab, merges = bpe.tokenizer.model.save(str(tmp_path))
    theirs = transformers.GPT2TokenizerFast(vocab=vocab, merges=merges)
    for text in make_documents(20, seed=7):
        (data,) = bpe.encode([text])
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert np.frombuffer(data, bpe.dtype).tolist() == ids


def test_what_is_forgotten_is_learnt_again(
    bpe: UnitEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna_core.data.vocabulary.CACHE_CHARACTERS", 10)
    for text in make_documents(5, seed=3):
        check(bpe, [text])


def test_the_name_of_the_end_in_a_text_is_text(bpe: UnitEncoder, tmp_path: Path) -> None:
    files = train_whitespace(["a b <|endoftext|> <unk>"], 10, tmp_path)
    for encoder in (bpe, open_encoder(files)):
        assert encoder.end is not None
        (data,) = encoder.encode(["a <|endoftext|> b"])
        assert encoder.end not in np.frombuffer(data, encoder.dtype)


def test_whitespace_is_the_dictionary_of_words(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "the": 2, "cat": 3}))
    encoder: Encoder = open_encoder(VocabularyFiles(kind="whitespace", vocab=path))
    found = encoder.encode([" the  cat\tsat ", ""])
    assert [np.frombuffer(data, "<u2").tolist() for data in found] == [[2, 3, 0], []]
    assert encoder.decode([2, 3, 9]) == "the cat ?9"


def test_training_gives_the_same_files_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for name, parallel in (("a", "true"), ("b", "false"), ("c", "true")):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        folder = tmp_path / name
        folder.mkdir()
        found.add(train_bpe(make_documents(200), 500, folder).digest())
    assert len(found) == 1
    assert train_whitespace(["b a a <unk>"], 4, tmp_path).vocab.read_text().split() == (
        '{ "<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 3 }'.split()  # noqa: SIM905
    )


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("whitespace", '{"a": 0}', "no <unk>"),
        ("whitespace", "[]", "JSON object"),
        ("whitespace", "{", "not JSON"),
        ("whitespace", '{"a": "b"}', "the id of 'a'"),
        ("whitespace", '{"a": 1, "b": 1}', "one id to two"),
        ("bpe", '{"a": 0}', "256 symbols"),
        ("wordpiece-lower", "a\nb\n", "no \\[UNK\\]"),
    ],
)
def test_a_vocabulary_of_another_kind_is_refused(
    tmp_path: Path, kind: Any, text: str, says: str
) -> None:
    path = tmp_path / "vocab"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        open_encoder(VocabularyFiles(kind=kind, vocab=path, merges=path))


def test_a_vocabulary_too_large_for_uint16_takes_int32(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"<unk>": 0} | {f"w{i}": i for i in range(1, 70000)}))
    files = VocabularyFiles(kind="whitespace", vocab=path)
    assert open_encoder(files).dtype == np.int32


def test_merges_of_another_vocabulary_are_refused(bpe: UnitEncoder, tmp_path: Path) -> None:
    vocab, merges = bpe.tokenizer.model.save(str(tmp_path))
    Path(merges).write_text("#version: 0.2\nzz qq\n")
    with pytest.raises(DataError, match="do not match"):
        open_encoder(VocabularyFiles(kind="bpe", vocab=Path(vocab), merges=Path(merges)))
    with pytest.raises(DataError, match="needs --merges"):
        open_encoder(VocabularyFiles(kind="bpe", vocab=Path(vocab)))

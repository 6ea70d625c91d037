"""BERT samples: what stands where, how much is masked, and that sample k is always the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.data.tokens import write_tokens
from varuna_core.data.bert import BertSamples, Pieces, build_pairs, open_bert
from varuna_core.data.errors import DataError

FIRST_WORD = 10
PIECES = Pieces(size=5000, cls=1, sep=2, mask=3, pad=0)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of one to nine sentences; tokens count up, so that each names its place."""
    path = tmp_path_factory.mktemp("bert") / "a"
    random = np.random.default_rng(0)
    token, documents = FIRST_WORD, []
    for _ in range(60):
        document = []
        for _ in range(random.integers(1, 10)):
            size = int(random.integers(1, 14))
            document.append(list(range(token, token + size)))
            token += size
        documents.append(document)
    write_tokens(path, documents)
    return str(path)


def open_run(prefix: str, sequence: int = 32, seed: int = 1) -> BertSamples:
    from varuna_core.data.indexed import open_tokens

    tokens = open_tokens(prefix)
    return BertSamples(tokens, "train", range(50), PIECES, sequence=sequence, seed=seed)


def restore(sample: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens before masking."""
    return np.where(sample["labels"] >= 0, sample["labels"], sample["text"])


@pytest.mark.parametrize("sequence", [8, 32, 200])
def test_a_sample_is_two_runs_of_sentences_between_marks(prefix: str, sequence: int) -> None:
    samples = open_run(prefix, sequence)
    starts = {int(samples.tokens.read(i)[0]) for i in range(samples.tokens.num_sequences)}
    follows = []
    for number in range(3 * len(samples.rows)):
        sample = samples.read(number)
        text, length = restore(sample), int(sample["padding_mask"].sum())
        assert text[0] == 1 and text[length - 1] == 2 and not text[length:].any()
        border = int(np.flatnonzero(text == 2)[0]) + 1
        first, second = text[1 : border - 1], text[border : length - 1]
        assert len(first) and len(second)
        for run in (first, second):
            assert np.array_equal(run, np.arange(run[0], run[0] + len(run)))
        assert sample["types"].tolist() == [0] * border + [1] * (length - border) + [0] * (
            sequence - length
        )
        if not sample["is_random"] and second[0] == first[-1] + 1:
            assert int(second[0]) in starts
        follows.append(int(sample["is_random"]))
    assert 0.35 < np.mean(follows) < 0.65


def test_fifteen_percent_are_predicted_and_most_of_these_hidden(prefix: str) -> None:
    samples = open_run(prefix, 64)
    predicted = hidden = kept = tokens = 0
    for number in range(800):
        sample = samples.read(number)
        chosen = sample["labels"] >= 0
        assert chosen.any() and not chosen[sample["padding_mask"] == 0].any()
        assert not (restore(sample)[chosen] < FIRST_WORD).any(), "a mark is never predicted"
        predicted += int(chosen.sum())
        tokens += int(sample["padding_mask"].sum()) - 3
        hidden += int((sample["text"][chosen] == PIECES.mask).sum())
        kept += int((sample["text"][chosen] == sample["labels"][chosen]).sum())
    assert 0.13 < predicted / tokens < 0.17
    assert 0.77 < hidden / predicted < 0.83
    assert 0.08 < kept / predicted < 0.12


@settings(deadline=None)
@given(numbers=st.lists(st.integers(0, 10**6), min_size=1, max_size=6), seed=st.integers(0, 2**64))
def test_sample_k_is_the_same_whoever_reads_it_and_in_whatever_order(
    prefix: str, numbers: list[int], seed: int
) -> None:
    one, other = open_run(prefix, seed=seed), open_run(prefix, seed=seed)
    batch = one.read_batch(numbers)
    for place, number in reversed(list(enumerate(numbers))):
        for key, array in other.read(number).items():
            assert np.array_equal(batch[key][place], array)


def test_an_epoch_takes_each_pair_once_and_masks_it_anew_in_the_next(prefix: str) -> None:
    samples = open_run(prefix)
    size = len(samples.rows)
    rows = [samples._locate_row(number) for number in range(2 * size)]
    assert sorted(rows[:size]) == sorted(rows[size:]) == list(range(size))
    assert rows[:size] != rows[size:]
    first = samples.read(rows[:size].index(0))
    second = samples.read(size + rows[size:].index(0))
    assert not np.array_equal(first["text"], second["text"])


def test_pairs_cover_every_document_of_two_sentences_or_more(prefix: str) -> None:
    samples = open_run(prefix)
    rows = build_pairs(samples.tokens, range(50), room=29, seed=1)
    covered = [i for begin, end, _ in rows.tolist() for i in range(begin, end)]
    borders = samples.tokens.documents[:51].tolist()
    wanted = [i for begin, end in pairwise(borders) if end - begin >= 2 for i in range(begin, end)]
    assert covered == wanted
    assert all(end - begin >= 2 for begin, end, _ in rows.tolist())
    assert 0 < np.mean(rows[:, 2] < 29) < 0.3


def test_what_has_no_pairs_or_another_vocabulary_is_refused(tmp_path: Path, prefix: str) -> None:
    write_tokens(tmp_path / "gpt", [[[11, 12, 13]]] * 5)
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + "\n".join(map(str, range(50))))
    with pytest.raises(DataError, match=r"too few documents.*--split-sentences"):
        open_bert(str(tmp_path / "gpt"), "train", vocab, split="1", sequence=16, seed=1)
    with pytest.raises(DataError, match="has only"):
        open_bert(prefix, "train", vocab, split="1", sequence=16, seed=1)
    vocab.write_text("a\nb\n[CLS]\n")
    with pytest.raises(DataError, match=r"no \[SEP\], \[MASK\], \[PAD\]"):
        open_bert(prefix, "train", vocab, split="1", sequence=16, seed=1)


def test_going_on_with_another_seed_is_refused(prefix: str) -> None:
    state = open_run(prefix).state()
    open_run(prefix).check_state(state)
    with pytest.raises(DataError, match="seed was 1, is 2"):
        open_run(prefix, seed=2).check_state(state)

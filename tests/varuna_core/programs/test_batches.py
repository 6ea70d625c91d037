"""Batches come by sample number, whoever reads them, and bad data are named."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.varuna_core.data.tokens import write_counting, write_tokens
from tests.varuna_core.programs.trainings import BERT, GPT, write_vocabulary
from varuna_core.data.errors import DataError
from varuna_core.programs.batches import TRAIN, VALID, Batch, ReadAhead, count_samples, open_source
from varuna_core.programs.place import ProgramError
from varuna_core.records.training import Training


@pytest.mark.parametrize("training", [GPT, BERT], ids=["gpt", "bert"])
def test_made_up_samples_depend_on_their_number_alone(training: Training) -> None:
    source = open_source(training)
    whole = source.read(TRAIN, range(6))
    parts = [source.read(TRAIN, range(0, 2)), source.read(TRAIN, range(2, 6))]
    for key, rows in whole.items():
        assert torch.equal(rows, torch.cat([part[key] for part in parts]))
        assert int(rows.max()) < training.vocab
    other = open_source(replace(training, seed=12)).read(TRAIN, range(6))
    valid = source.read(VALID, range(6))
    assert any(not torch.equal(whole[key], other[key]) for key in whole)
    assert any(not torch.equal(whole[key], valid[key]) for key in whole)


def test_evaluations_have_samples_of_their_own() -> None:
    training = replace(GPT, steps=25, evaluate_every=10, evaluate_steps=3)
    assert count_samples(training) == {TRAIN: 25 * 8, VALID: 2 * 3 * 8}
    assert count_samples(GPT)[VALID] == 0


def test_a_blend_is_read_from_all_its_parts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_counting(tmp_path / name, [60] * 20)
    data = ((3.0, str(tmp_path / "a")), (1.0, str(tmp_path / "b")))
    source = open_source(replace(GPT, data=data, vocab=10**6))
    assert source.read(TRAIN, range(8))["tokens"].shape == (8, GPT.sequence + 1)
    assert source.state()["taken"] == [36, 12]


def test_a_token_outside_the_vocabulary_is_named_with_its_file(tmp_path: Path) -> None:
    write_counting(tmp_path / "a", [60] * 20)
    source = open_source(replace(GPT, data=((1.0, str(tmp_path / "a")),), vocab=5))
    with pytest.raises(ProgramError, match=r"a \(train\) has token \d+, but model.vocab is 5"):
        source.read(TRAIN, range(4))


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [[[5, 6, 7]] * 4] * 10)
    vocab = write_vocabulary(tmp_path / "vocab.txt", 700)
    training = replace(BERT, data=((1.0, str(tmp_path / "a")),), vocabulary=vocab)
    assert open_source(replace(training, vocab=700)).read(TRAIN, range(2)).keys() >= {"text"}
    with pytest.raises(ProgramError, match=r"has 700 tokens, but model.vocab is 64"):
        open_source(training)
    with pytest.raises(ProgramError, match=r"needs exactly one data.prefix, and data.vocab"):
        open_source(replace(training, vocabulary=None))


def test_a_part_without_documents_is_refused_only_where_it_is_needed(tmp_path: Path) -> None:
    write_counting(tmp_path / "a", [600] * 4)
    training = replace(GPT, data=((1.0, str(tmp_path / "a")),), split="1,0,0", vocab=10**6)
    open_source(training)
    with pytest.raises(DataError, match="too few documents"):
        open_source(replace(training, evaluate_every=2))


def test_the_next_batch_is_read_while_a_step_runs() -> None:
    read, second = [], threading.Event()

    def make(step: int) -> Batch:
        read.append(step)
        if step == 2:
            second.set()
        return {"step": torch.tensor(step)}

    ahead = ReadAhead(make, last=3)
    assert ahead.take(1)["step"] == 1
    assert second.wait(20)
    assert [int(ahead.take(step)["step"]) for step in (2, 3)] == [2, 3]
    ahead.close()
    assert read == [1, 2, 3]


def test_what_fails_ahead_is_raised_where_it_is_taken() -> None:
    def make(step: int) -> Batch:
        if step == 2:
            raise OSError("stale file handle")
        return {}

    ahead = ReadAhead(make, last=5)
    ahead.take(1)
    with pytest.raises(OSError, match="stale"):
        ahead.take(2)
    ahead.close()

"""Read batches by sample numbers, one step ahead, from token files, BERT pairs or random tokens.

Sample k depends only on the settings and k, so a run's position is the number of samples that it
has consumed, and a run with another layout can continue from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from varuna_core.programs.bert import NO_LABEL
from varuna_core.programs.place import ProgramError
from varuna_core.records.training import Training
from varuna_core.runtime.split.random_streams import derive_seed

Batch = dict[str, Tensor]
TRAIN, VALID = "train", "valid"
MASK_SHARE = 0.15


class BatchSource(Protocol):
    """Reads samples by number."""

    def read(self, part: str, numbers: range) -> Batch:
        """Return a batch with these samples, one in each row."""

    def state(self) -> dict[str, Any]:
        """Return the settings that the order of samples depends on, as JSON values."""

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise an error if the saved settings give another order of samples."""


def count_evaluations(training: Training) -> int:
    return training.steps // training.evaluate_every if training.evaluate_every else 0


def count_samples(training: Training) -> dict[str, int]:
    """Return the number of samples of each part that the whole training reads."""
    steps = count_evaluations(training) * training.evaluate_steps
    return {
        TRAIN: training.steps * training.global_batch_size,
        VALID: steps * training.global_batch_size,
    }


def open_source(training: Training) -> BatchSource:
    if training.data is None:
        return MadeUp(training)
    if training.program == "pretrain_bert":
        return BertPairs(training)
    return Tokens(training)


class Tokens:
    """Sequences from token files, for a GPT."""

    def __init__(self, training: Training) -> None:
        from varuna_core.data.blend import open_samples

        assert training.data is not None
        self._training = training
        self._parts = open_samples(
            training.data,
            split=training.split,
            num_samples=count_samples(training),
            sequence=training.sequence,
            seed=training.seed,
        )

    def read(self, part: str, numbers: range) -> Batch:
        rows = self._parts[part].read_batch(numbers)
        if rows.size and int(rows.max()) >= self._training.vocab:
            raise ProgramError(
                f"{_name_data(self._training)} ({part}) has token {int(rows.max())}, but "
                f"model.vocab is {self._training.vocab}: set it to the size of the vocabulary"
            )
        return {"tokens": torch.from_numpy(rows)}

    def state(self) -> dict[str, Any]:
        return self._parts[TRAIN].state()

    def check_state(self, saved: Mapping[str, Any]) -> None:
        self._parts[TRAIN].check_state(saved)


def _name_data(training: Training) -> str:
    return " and ".join(prefix for _, prefix in training.data or ())


class BertPairs:
    """Masked pairs of sentences, for a BERT."""

    def __init__(self, training: Training) -> None:
        from varuna_core.data.bert import open_bert

        if training.data is None or training.vocabulary is None or len(training.data) != 1:
            raise ProgramError(
                "a BERT model needs exactly one data.prefix, and data.vocab, its vocab.txt"
            )
        ((_, prefix),) = training.data
        self._parts = {
            part: open_bert(
                prefix,
                part,
                Path(training.vocabulary),
                split=training.split,
                sequence=training.sequence,
                seed=training.seed,
            )
            for part, count in count_samples(training).items()
            if count
        }
        size = self._parts[TRAIN].pieces.size
        if size > training.vocab:
            raise ProgramError(
                f"{training.vocabulary} has {size} tokens, but model.vocab is {training.vocab}: "
                "set it to that number or more"
            )

    def read(self, part: str, numbers: range) -> Batch:
        found = self._parts[part].read_batch(numbers)
        return {key: torch.from_numpy(rows) for key, rows in found.items()}

    def state(self) -> dict[str, Any]:
        return self._parts[TRAIN].state()

    def check_state(self, saved: Mapping[str, Any]) -> None:
        self._parts[TRAIN].check_state(saved)


class MadeUp:
    """Random tokens, for measurements without a data set."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def read(self, part: str, numbers: range) -> Batch:
        make = self._make_bert if self._training.program == "pretrain_bert" else self._make_gpt
        rows = [make(self._seed(part, number)) for number in numbers]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]} if rows else {}

    def _seed(self, part: str, number: int) -> torch.Generator:
        seed = derive_seed(self._training.seed, f"{part}/{number}")
        return torch.Generator().manual_seed(seed)

    def _make_gpt(self, draw: torch.Generator) -> Batch:
        size = (self._training.sequence + 1,)
        return {"tokens": torch.randint(self._training.vocab, size, generator=draw)}

    def _make_bert(self, draw: torch.Generator) -> Batch:
        size = self._training.sequence
        text = torch.randint(self._training.vocab, (size,), generator=draw)
        chosen = torch.rand(size, generator=draw) < MASK_SHARE
        chosen[0] = True  # a sample without any has no loss
        return {
            "text": text,
            "types": (torch.arange(size) >= size // 2).long(),
            "labels": torch.where(chosen, text, NO_LABEL),
            "padding_mask": torch.ones(size, dtype=torch.long),
            "is_random": torch.randint(2, (), generator=draw),
        }

    def state(self) -> dict[str, Any]:
        training = self._training
        return {"vocab": training.vocab, "sequence": training.sequence, "seed": training.seed}

    def check_state(self, saved: Mapping[str, Any]) -> None:
        if saved != self.state():
            raise ProgramError(f"the synthetic data had {dict(saved)}, but now has {self.state()}")


class ReadAhead:
    """Reads the batch of the next step while the present step runs."""

    def __init__(self, read: Callable[[int], Batch], last: int) -> None:
        """`read(step)` makes a batch; `last` is the last step."""
        self._read, self._last = read, last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._coming: tuple[int, Future[Batch]] | None = None

    def take(self, step: int) -> Batch:
        coming, self._coming = self._coming, None
        is_here = coming is not None and coming[0] == step
        batch = coming[1].result() if coming is not None and is_here else self._read(step)
        if step < self._last:
            self._coming = step + 1, self._pool.submit(self._read, step + 1)
        return batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

"""Read samples for a GPT: sequence + 1 tokens each, which may span several documents.

Sample numbers are positions in the order of training: a run of any layout that has consumed n
samples resumes at sample n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_core.data.errors import DataError
from varuna_core.data.index_maps import IndexMaps, load_or_build
from varuna_core.data.indexed import TokenFile, open_tokens
from varuna_core.data.split import NAMES, check_order, split_documents

Array = npt.NDArray[Any]


class GptSamples:
    """Samples of one part (train, valid or test) of one data set, in training order."""

    def __init__(
        self,
        tokens: TokenFile,
        part: str,
        documents: range,
        *,
        num_samples: int,
        sequence: int,
        seed: int,
        may_write: bool = True,
    ) -> None:
        self.tokens = tokens
        self.part = part
        self.documents = documents
        self.num_samples = num_samples
        self.sequence = sequence
        self.seed = seed
        self.maps: IndexMaps = load_or_build(
            tokens.prefix, part, tokens.lengths, documents,
            num_samples=num_samples, sequence=sequence, seed=seed, may_write=may_write,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.maps.num_samples

    def read(self, number: int) -> Array:
        """Return sample `number`: sequence + 1 tokens, int64."""
        if not 0 <= number < len(self):
            raise DataError(
                f"{self.tokens.prefix} ({self.part}) has no sample {number:,}: its order was made "
                f"for {self.num_samples:,} samples and ends at {len(self) - 1:,}"
            )
        row = int(self.maps.shuffle[number])
        (first, start), (last, end) = self.maps.sample[row : row + 2].tolist()
        if first == last:
            parts = [self.tokens.read(int(self.maps.document[first]), start, end + 1)]
        else:
            between = [self.tokens.read(int(d)) for d in self.maps.document[first + 1 : last]]
            parts = [
                self.tokens.read(int(self.maps.document[first]), start),
                *between,
                self.tokens.read(int(self.maps.document[last]), 0, end + 1),
            ]
        sample = np.empty(self.sequence + 1, np.int64)
        np.concatenate(parts, out=sample)
        return sample

    def read_batch(self, numbers: Iterable[int]) -> Array:
        """Return samples, one in each row."""
        rows = [self.read(number) for number in numbers]
        return np.stack(rows) if rows else np.empty((0, self.sequence + 1), np.int64)

    def state(self) -> dict[str, Any]:
        """Return the settings that determine the order of samples, as JSON values for a checkpoint.

        The number of samples is not included: a larger number keeps the order up to the next epoch.
        """
        return {
            "part": self.part,
            "sequence": self.sequence,
            "seed": self.seed,
            "documents": [self.documents.start, self.documents.stop],
            "lengths": self.tokens.digest(),
            "epochs": len(self.maps.document) // len(self.documents),
            "order": self.maps.digest(),
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise an error if a checkpoint was made with another order of samples."""
        check_order(f"{self.tokens.prefix} ({self.part})", saved, self.state())


def open_gpt(
    prefix: str,
    *,
    split: str,
    num_samples: Mapping[str, int],
    sequence: int,
    seed: int,
    may_write: bool = True,
) -> dict[str, GptSamples]:
    """Open the parts for which `num_samples` asks for samples; the result is keyed by name."""
    tokens = open_tokens(prefix)
    documents = split_documents(split, tokens.num_sequences)
    found = {}
    for part in NAMES:
        count = num_samples.get(part, 0)
        if count < 1:
            continue
        if not documents[part]:
            raise DataError(
                f'{prefix} has too few documents: split "{split}" gives {part} none of '
                f"{tokens.num_sequences:,}, but {count:,} samples of it are needed. Give it a "
                "larger share"
            )
        found[part] = GptSamples(
            tokens, part, documents[part],
            num_samples=count, sequence=sequence, seed=seed, may_write=may_write,
        )  # fmt: skip
    return found

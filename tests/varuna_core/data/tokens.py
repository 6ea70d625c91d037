"""Small token files for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from varuna_core.data.indexed import TokenFile, bin_path, idx_path, open_tokens, write_index

lengths_of_documents = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(
    lambda lengths: sum(lengths) > 0
)


def write_tokens(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "<u2"
) -> TokenFile:
    """A pair of files from documents of sequences of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    kind = np.dtype(dtype)
    with open(bin_path(prefix), "wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, kind).tobytes())
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    entries = np.cumsum([0] + [len(document) for document in documents])
    with open(idx_path(prefix), "wb") as file:
        write_index(file, kind, lengths, entries)
    return open_tokens(prefix)


def write_counting(prefix: Path, lengths: Sequence[int]) -> TokenFile:
    """One sequence a document; the tokens count up, so that each names its place."""
    ends = np.cumsum(lengths)
    spans = zip(ends - np.array(lengths), ends, strict=True)
    return write_tokens(prefix, [[list(range(begin, end))] for begin, end in spans], "<i4")

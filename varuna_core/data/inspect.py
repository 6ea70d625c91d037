"""Description of a pair of files for people: its numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from varuna_core.data.errors import DataError
from varuna_core.data.index_maps import load_or_build, name_maps
from varuna_core.data.indexed import bin_path, open_tokens
from varuna_core.data.split import split_documents

_MAPS = re.compile(r"_(train|valid|test)_indexmap_(\d+)ns_(\d+)sl_(\d+)s_doc_idx\.npy")


def inspect(prefix: str, split: str) -> dict[str, Any]:
    """Sizes, lengths, the split, and the index maps beside it with what is wrong with them."""
    tokens = open_tokens(prefix)
    lengths = np.asarray(tokens.lengths)
    sizes = np.diff(tokens.documents)
    documents = split_documents(split, tokens.num_sequences)
    found: dict[str, Any] = {
        "format": 1,
        "prefix": prefix,
        "dtype": tokens.dtype.name,
        "documents": tokens.num_documents,
        "sequences": tokens.num_sequences,
        "tokens": tokens.num_tokens,
        "bytes": bin_path(prefix).stat().st_size,
        "sequence_length": _describe(lengths),
        "sequences_per_document": _describe(sizes),
        "largest_token": int(tokens.tokens.max()) if len(tokens.tokens) else None,
        "split": {
            part: {
                "sequences": len(numbers),
                "tokens": int(lengths[numbers.start : numbers.stop].sum(dtype=np.int64)),
            }
            for part, numbers in documents.items()
        },
        "index_maps": [],
    }
    folder, stem = Path(prefix).parent, Path(prefix).name
    for path in sorted(folder.glob("*_doc_idx.npy")):
        match = _MAPS.fullmatch(path.name.removeprefix(stem))
        if not path.name.startswith(stem) or not match:
            continue
        settings = dict(zip(("num_samples", "sequence", "seed"), map(int, match.groups()[1:])))  # noqa: B905 - three each
        entry: dict[str, Any] = {"part": match[1], **settings, "fault": ""}
        names = name_maps(prefix, match[1], **settings)
        missing = [name.name for name in names if not name.is_file()]
        if missing:
            entry["fault"] = f"{', '.join(missing)} missing"
        else:
            try:
                numbers = documents[match[1]]
                load_or_build(prefix, match[1], lengths, numbers, may_write=False, **settings)
            except DataError as error:
                entry["fault"] = str(error)
        found["index_maps"].append(entry)
    return found


def _describe(values: Any) -> dict[str, float]:
    if not len(values):
        return {"min": 0, "median": 0, "max": 0}
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def render(found: dict[str, Any]) -> str:
    """For a terminal."""
    lengths = found["sequence_length"]
    lines = [
        f"{found['prefix']}: {found['tokens']:,} tokens ({found['dtype']}), "
        f"{found['bytes']:,} bytes",
        f"  documents  {found['documents']:,}, sequences {found['sequences']:,} of "
        f"{lengths['min']:,} to {lengths['max']:,} tokens, median {lengths['median']:,.0f}",
        f"  largest    token {found['largest_token']}",
    ]
    for part, numbers in found["split"].items():
        lines.append(
            f"  {part:<10} {numbers['sequences']:,} sequences, {numbers['tokens']:,} tokens"
        )
    for maps in found["index_maps"]:
        what = (
            f"{maps['part']}, {maps['num_samples']:,} samples of {maps['sequence']:,} tokens, "
            f"seed {maps['seed']}"
        )
        lines.append(f"  index map  {what}: {maps['fault'] or 'good'}")
    return "\n".join(lines)

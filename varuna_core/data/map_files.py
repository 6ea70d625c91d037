"""Index maps on disk, under the names that Megatron gave them until May 2023.

`PREFIX_train_indexmap_1600ns_1024sl_1234s_doc_idx.npy` and so on: maps that are there are used,
checked against the data set; missing ones are built, and written if the folder lets us. They are
built in well under a second, so every rank that finds none builds its own: nobody waits for a file
of another rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_core.data.errors import DataError
from varuna_core.data.index_maps import IndexMaps, build_maps, find_fault

log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
PARTS = ("doc_idx", "sample_idx", "shuffle_idx")


def name_maps(
    prefix: str, part: str, *, num_samples: int, sequence: int, seed: int
) -> tuple[Path, Path, Path]:
    """The files of one part (train, valid, test): document, sample and shuffle index."""
    stem = f"{prefix}_{part}_indexmap_{num_samples}ns_{sequence}sl_{seed}s"
    document, sample, shuffle = (Path(f"{stem}_{kind}.npy") for kind in PARTS)
    return document, sample, shuffle


def load_or_build(
    prefix: str,
    part: str,
    lengths: Array,
    documents: range,
    *,
    num_samples: int,
    sequence: int,
    seed: int,
    may_write: bool = True,
) -> IndexMaps:
    """The maps of one part of the data set `prefix`."""
    paths = name_maps(prefix, part, num_samples=num_samples, sequence=sequence, seed=seed)
    if all(path.is_file() for path in paths):
        maps = IndexMaps(*(_read(path) for path in paths))
        fault = find_fault(maps, lengths, documents, num_samples=num_samples, sequence=sequence)
        if fault:
            raise DataError(
                f"{paths[0]} and its two companions are not the index maps of {prefix} with this "
                f"split: {fault}. Remove the three files, and they are made anew"
            )
        return maps
    maps = build_maps(lengths, documents, num_samples=num_samples, sequence=sequence, seed=seed)
    if may_write:
        _write_all(paths, maps)
    return maps


def _read(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}. Remove it, and it is made anew") from None
    return array


def _write_all(paths: tuple[Path, Path, Path], maps: IndexMaps) -> None:
    """Ranks that write at once write the same; a folder without room or right stays as it is."""
    try:
        for path, array in zip(paths, (maps.document, maps.sample, maps.shuffle), strict=True):
            write_array(path, array)
    except OSError as error:
        log.warning("index maps are not kept: %s: %s", error.filename or paths[0], error.strerror)


def write_array(path: Path, array: Array) -> None:
    """An .npy file that appears whole or not at all."""
    fd, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise

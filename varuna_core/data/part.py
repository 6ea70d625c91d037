"""The folder in which a data set is made, until it is whole: `PREFIX_text_document.part/`.

    tokens.bin   lengths.i4   counts.i4      tokens, tokens a sequence, sequences a document
    journal.json                             how far all of them are good, and up to which input
    vocab.json   merges.txt                  where the vocabulary is trained here

The journal is written after its files are synced. Whatever else they hold after a kill or on a full
disk is cut off when the same work goes on; other work starts anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from varuna_core.data.errors import DataError
from varuna_core.data.indexed import bin_path, idx_path, write_index
from varuna_core.data.text import Place
from varuna_core.records.files import read_json, write_json

FILES = ("tokens.bin", "lengths.i4", "counts.i4")
JOURNAL = "journal.json"
PUBLIC_FILE = 0o644


@dataclass(kw_only=True)
class Journal:
    """How far the work is."""

    key: str
    """Digest of everything that the output depends on."""
    file: int = 0
    """Number of the input to go on with."""
    place: Place = Place()  # noqa: RUF009 - frozen
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Good bytes of the three files."""
    counts: dict[str, int] = field(default_factory=dict)
    """Documents, tokens and so on, for the summary."""


class PartFolder:
    """Appends to the three files; `commit` makes it last, `finish` gives the final names."""

    def __init__(self, prefix: str, key: str) -> None:
        self.prefix = prefix
        self.path = Path(f"{prefix}.part")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take()
        found = _read_journal(self.path / JOURNAL, key)
        if found is None:
            self._empty()
        self.is_resumed = found is not None
        self.journal = found or Journal(key=key)
        sizes = self.journal.sizes
        self._files = [self._open(name, good) for name, good in zip(FILES, sizes, strict=True)]
        write_json(self.path / JOURNAL, asdict(self.journal), PUBLIC_FILE)

    def _take(self) -> int:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DataError(
                f"{self.path} is in use: another prepare writes {self.prefix}"
            ) from None
        except OSError:
            pass  # a file system without locks
        return fd

    def _empty(self) -> None:
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _open(self, name: str, size: int) -> BinaryIO:
        file = open(self.path / name, "ab")  # noqa: SIM115 - closed by close()
        file.truncate(size)
        return file

    def append(
        self, data: tuple[bytes, bytes, bytes], file: int, place: Place, counts: dict[str, int]
    ) -> None:
        """To each of the three files. One assignment at the end: Ctrl-C comes before or after."""
        for handle, more in zip(self._files, data, strict=True):
            handle.write(more)
        sizes = [old + len(more) for old, more in zip(self.journal.sizes, data, strict=True)]
        self.journal = Journal(
            key=self.journal.key, file=file, place=place, sizes=sizes, counts=dict(counts)
        )

    def commit(self) -> None:
        """From here the same work would go on."""
        for handle in self._files:
            handle.flush()
            os.fsync(handle.fileno())
        write_json(self.path / JOURNAL, asdict(self.journal), PUBLIC_FILE)

    def close(self) -> None:
        """What was not committed may be torn; it is cut off later."""
        for handle in self._files:
            with contextlib.suppress(OSError):
                handle.close()
        os.close(self._lock)

    def finish(self, dtype: np.dtype[Any], others: dict[str, Path]) -> None:
        """Give everything its final name; `others` are files of this folder to keep, and where.

        The old index goes first and the new one comes last: a reader needs both files of a pair.
        """
        lengths = np.fromfile(self.path / FILES[1], "<i4")
        counts = np.fromfile(self.path / FILES[2], "<i4")
        documents = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        index = self.path / "index"
        with open(index, "wb") as file:
            write_index(file, dtype, lengths, documents)
            file.flush()
            os.fsync(file.fileno())
        idx_path(self.prefix).unlink(missing_ok=True)
        for name, path in others.items():
            os.replace(self.path / name, path)
        os.replace(self.path / FILES[0], bin_path(self.prefix))
        os.replace(index, idx_path(self.prefix))
        _sync_folder(self.path.parent)
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def discard(self) -> None:
        """Nothing is worth keeping."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _read_journal(path: Path, key: str) -> Journal | None:
    found = read_json(path)
    try:
        journal = Journal(**{**found, "place": Place(**found["place"])})
        sizes = [(path.parent / name).stat().st_size for name in FILES]
    except (TypeError, KeyError, OSError):
        return None
    is_whole = all(there >= good for there, good in zip(sizes, journal.sizes, strict=True))
    return journal if journal.key == key and is_whole else None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(fd)
    finally:
        os.close(fd)

"""Access an object store through fsspec, with the methods of `Path` that checkpoint readers use.

    parse_path("s3://bucket/step-1000")     a place that opens, lists and measures as a Path does
    parse_path("ckpt")                      a Path

fsspec is imported only for URLs; each protocol needs its own package, such as s3fs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from varuna_core.checkpoint.format.errors import CheckpointError


@dataclass(frozen=True)
class RemotePath:
    """A file or folder in an object store, compared by its URL."""

    url: str

    @property
    def store(self) -> tuple[Any, str]:
        """fsspec's file system, and the path in it."""
        try:
            import fsspec  # not there unless somebody asks for a URL
        except ImportError as error:
            raise CheckpointError(f"{self.url} needs fsspec: pip install fsspec") from error
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{self.url} cannot be opened: {error}") from error
        return found

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    def __lt__(self, other: RemotePath) -> bool:
        return self.url < other.url

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def open(self, mode: str = "rb") -> Any:
        files, path = self.store
        return files.open(path, mode)

    def read_text(self) -> str:
        with self.open("rb") as file:
            return bytes(file.read()).decode()

    def stat(self) -> Any:
        files, path = self.store
        return SimpleNamespace(st_size=files.info(path)["size"])

    def exists(self) -> bool:
        files, path = self.store
        return bool(files.exists(path))

    def is_file(self) -> bool:
        files, path = self.store
        return bool(files.isfile(path))

    def is_dir(self) -> bool:
        files, path = self.store
        return bool(files.isdir(path))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        files, path = self.store
        for found in files.glob(f"{path.rstrip('/')}/{pattern}"):
            yield self / found.rpartition("/")[2]


def parse_path(text: str | Path) -> Path:
    """Convert a path or URL from the command line."""
    if "://" in str(text):
        return cast(Path, RemotePath(str(text)))
    return Path(text)


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield the target itself or, for a URL, a temporary local folder, uploaded at the end."""
    if not isinstance(target, RemotePath):
        yield target
        return
    if target.exists():
        raise CheckpointError(f"{target} already exists: give a new folder")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, target.name)
        yield made
        files, path = target.store
        files.put(str(made), path, recursive=made.is_dir())

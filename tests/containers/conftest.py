"""Room for unpacked images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Node-local disk of the test's own. No spaces: enroot bears none in its data path."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder
    for path in folder.rglob("*"):  # enroot leaves mount points of mode 000
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)

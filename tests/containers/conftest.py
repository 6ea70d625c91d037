"""A small real image, made once, and the runtimes that work here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.image import make_squashfs


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .sqsh file of a real root folder."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("needs mksquashfs: apt-get install squashfs-tools")
    return make_squashfs(tmp_path_factory.mktemp("image"))


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Node-local disk of the test's own. No spaces: enroot bears none in its data path."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder
    for path in folder.rglob("*"):  # enroot leaves mount points of mode 000
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)

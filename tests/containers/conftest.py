"""Room for unpacked images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.real import Tools
from tests.varuna_core.conftest import make_stage

__all__ = ["make_stage"]


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory, image: Path) -> Iterator[Tools]:
    """The runtimes of this machine."""
    tools = Tools(tmp_path_factory.mktemp("tools"), image)
    yield tools
    tools.close()


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Node-local disk of the test's own. No spaces: enroot bears none in its data path."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder
    for path in folder.rglob("*"):  # enroot leaves mount points of mode 000
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)

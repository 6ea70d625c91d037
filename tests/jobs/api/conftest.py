"""An executor of submitit's that makes runs of vjob on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import submitit

from tests import ROOT
from tests.plugin import installed


@pytest.fixture(scope="package")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("plugin")):
        yield


@pytest.fixture
def here(plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for logs; ranks find the tests' functions in the working directory."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def executor(here: Path) -> submitit.AutoExecutor:
    executor = submitit.AutoExecutor(folder=here / "log", cluster="vjob")
    executor.update_parameters(timeout_min=5, vjob_set={"cluster.scheduler": "local"})
    return executor

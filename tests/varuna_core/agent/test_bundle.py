"""agent.pyz: one file, the same bytes each time, and commands that teach."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from varuna_core.agent.bundle import write_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "agent.pyz"
    write_bundle(path)
    return path


def call(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    # -S -E: no site packages and no PYTHONPATH, as on a bare node.
    return subprocess.run(
        [sys.executable, "-S", "-E", *words], capture_output=True, text=True, timeout=20, env=env
    )


def test_the_same_sources_give_the_same_bytes(bundle: Path) -> None:
    again = bundle.with_name("again.pyz")
    write_bundle(again)
    os.utime(again, (0, 0))
    assert again.read_bytes() == bundle.read_bytes()


def test_it_holds_the_agent_and_the_records_and_nothing_else(bundle: Path) -> None:
    names = zipfile.ZipFile(bundle).namelist()
    folders = {"/".join(name.split("/")[:-1][:2]) for name in names}
    parts = ("", "/records", "/agent", "/morph", "/trace")
    assert folders == {"", *(f"varuna_core{part}" for part in parts)}
    assert "varuna_core/records/plan.py" in names and "__main__.py" in names


def test_help_shows_the_order_of_the_commands(bundle: Path) -> None:
    result = call(str(bundle), "--help")
    assert result.returncode == 0, result.stderr
    for command in ("open", "node", "close", "stop"):
        assert f"agent.pyz {command}" in result.stdout
        assert call(str(bundle), command, "--help").returncode == 0


def test_the_module_is_the_same_program() -> None:
    root = ROOT
    env = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-m", "varuna_core.agent", "node", "--help"],
        capture_output=True,
        text=True,
        env=env,
        timeout=20,
    )
    assert "SLURM_NODEID" in result.stdout


def test_wrong_input_is_2_with_a_sentence(bundle: Path, tmp_path: Path) -> None:
    result = call(str(bundle), "open", "--run", str(tmp_path / "none"), "--attempt", "0")
    assert (result.returncode, "no run folder here" in result.stderr) == (2, True)
    result = call(str(bundle), "node", "--run", str(tmp_path), "--attempt", "0")
    assert (result.returncode, "missing, torn" in result.stderr) == (2, True)

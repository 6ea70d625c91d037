"""What nodes run is sound shell, and our hook sets only what is unset."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

FOLDER = ROOT / "containers"
HOOK = FOLDER / "hooks" / "50-vjob.sh"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.sh")), ids=lambda path: path.name)
def test_shell_passes_shellcheck(path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run(
        ["shellcheck", "--shell=bash", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def run_hook(folder: Path, given: str) -> dict[str, str]:
    """What the hook leaves in the environment file that enroot gives it."""
    state = folder / "attempt-1" / "state"
    state.mkdir(parents=True)
    master = {"address": "127.0.0.1", "port": 61001, "host": "n0"}
    (state / "master.json").write_text(json.dumps(master, indent=1))
    (state / "go.json").write_text(json.dumps({"port": 61002}, indent=1))
    environ = folder / "environ"
    environ.write_text(given)
    env = {**os.environ, "ENROOT_ENVIRON": str(environ), "VJOB_RUN": str(folder)}
    subprocess.run([HOOK], env={**env, "VJOB_ATTEMPT": "1"}, check=True)
    return dict(line.split("=", 1) for line in environ.read_text().splitlines())


def test_the_hook_gives_address_port_and_interface(tmp_path: Path) -> None:
    found = run_hook(tmp_path, "")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "61002")
    if shutil.which("ip"):
        assert found["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_hook_keeps_what_is_set(tmp_path: Path) -> None:
    found = run_hook(tmp_path, "MASTER_ADDR=10.0.0.1\nNCCL_SOCKET_IFNAME=ib0\n")
    assert (found["MASTER_ADDR"], found["NCCL_SOCKET_IFNAME"]) == ("10.0.0.1", "ib0")
    assert found["MASTER_PORT"] == "61002"


def test_the_hook_does_nothing_outside_a_run(tmp_path: Path) -> None:
    environ = tmp_path / "environ"
    environ.write_text("A=b\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("VJOB_")}
    subprocess.run([HOOK], env={**env, "ENROOT_ENVIRON": str(environ)}, check=True)
    assert environ.read_text() == "A=b\n"

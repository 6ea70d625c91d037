"""enroot for real: what only it has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.containers.request import make_request
from vjob.containers.enroot import build_paths
from vjob.containers.store import Store

HOOK = ROOT / "containers/hooks/50-vjob.sh"

pytestmark = [
    pytest.mark.enroot,
    pytest.mark.skipif(shutil.which("enroot") is None, reason="enroot is not installed"),
]


def test_a_container_started_by_hand_finds_the_runs_address(
    tmp_path: Path, image: Path, scratch: Path
) -> None:
    """The hook lies where a user without root puts it."""
    request = make_request(image, scratch)
    store = Store(request)
    config = tmp_path / "config"
    (config / "hooks.d").mkdir(parents=True)
    shutil.copy(HOOK, config / "hooks.d")
    state = tmp_path / "run/attempt-0/state"
    state.mkdir(parents=True)
    (state / "master.json").write_text(
        json.dumps({"address": "127.0.0.1", "port": 61003}, indent=1)
    )
    env = {**os.environ, **build_paths(store), "ENROOT_CONFIG_PATH": str(config)}
    subprocess.run(store.build_prepare("enroot"), env=env, check=True)
    words = ["enroot", "start", "--env", "MASTER_PORT=7", store.name, "env"]
    env["VJOB_RUN"] = str(tmp_path / "run")
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "MASTER_ADDR=127.0.0.1\n" in said
    assert "MASTER_PORT=7\n" in said, "what is set stays"

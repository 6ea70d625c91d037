"""enroot for real: what only it has."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import read_out, wait_for
from tests.containers.real import Tools
from tests.containers.request import make_request
from tests.containers.test_behaviour import Box, find_agents, find_holders, find_processes
from tests.varuna_core.agent.local_run import is_running
from vjob.containers.enroot import build_environment
from vjob.containers.store import Store

SHARES = """
import os, time
from pathlib import Path
Path("/tmp/rank-" + os.environ["RANK"]).touch()
while len(found := sorted(path.name for path in Path("/tmp").glob("rank-*"))) < 2:
    time.sleep(0.05)
print(*found)
"""

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
    env = {**os.environ, **build_environment(store), "ENROOT_CONFIG_PATH": str(config)}
    subprocess.run(store.build_prepare("enroot"), env=env, check=True)
    words = ["enroot", "start", "--env", "MASTER_PORT=7", store.name, "env"]
    env["VJOB_RUN"] = str(tmp_path / "run")
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "MASTER_ADDR=127.0.0.1\n" in said
    assert "MASTER_PORT=7\n" in said, "what is set stays"


def test_hooks_run_once_a_node_and_its_ranks_share_tmp(
    tmp_path: Path, image: Path, scratch: Path, tools: Tools
) -> None:
    """Each rank was a start of its own: behind a hook of 5 s the seventh of a node died waiting."""
    box = Box("enroot", tmp_path, str(image), scratch, tools.path)
    log, hooks = tmp_path / "hooks.log", tmp_path / "home/.config/enroot/hooks.d"
    hooks.mkdir(parents=True)
    (hooks / "60-noted.sh").write_text(f"#!/bin/sh\necho ran >>'{log}'\n")
    (hooks / "60-noted.sh").chmod(0o755)
    box.vjob.env["HOME"] = str(tmp_path / "home")
    script = tmp_path / "shares.py"
    script.write_text(SHARES)
    run = box.vjob.submit(box.conf(script))
    assert box.vjob.wait_over(run)["verdict"] == "COMPLETED", box.vjob.explain(run)
    assert sorted(read_out(run).splitlines()) == ["rank-0 rank-1"] * 2 + ["rank-2 rank-3"] * 2
    assert log.read_text() == "ran\n" * 2


def test_a_killed_agent_takes_its_container_along_and_a_killed_container_no_rank(
    tmp_path: Path, image: Path, scratch: Path, tools: Tools
) -> None:
    box = Box("enroot", tmp_path, str(image), scratch, tools.path)
    run = box.vjob.submit(box.conf(box.copy("fail_as_told.py"), "-1", "hang", "catch"))
    wait_for(lambda: read_out(run).count("ready") == 4, 60, lambda: box.vjob.explain(run))
    holders = find_holders(run)
    assert len(holders) == 2
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
    assert "left after it was asked to save" in box.vjob("cancel", "last").stdout
    assert read_out(run).count("got SIGUSR1") == 4

    run = box.vjob.submit(box.conf(box.copy("fail_as_told.py"), "-1", "hang", "deaf"))
    wait_for(lambda: read_out(run).count("ready") == 4, 60, lambda: box.vjob.explain(run))
    holders = find_holders(run)
    for pid in find_agents(run):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, holders)) and not find_processes(run), 30)


def test_a_shell_on_a_node_is_in_its_ranks_container(
    tmp_path: Path, image: Path, scratch: Path, tools: Tools
) -> None:
    box = Box("enroot", tmp_path, str(image), scratch, tools.path)
    script = tmp_path / "waits.py"
    script.write_text(SHARES + "print('ready', flush=True)\ntime.sleep(600)\n")
    run = box.vjob.submit(box.conf(script, more="env: {NOTE: of the conf}\n"))
    wait_for(lambda: read_out(run).count("ready") == 4, 60, lambda: box.vjob.explain(run))
    words = ("sh", "-c", 'echo "$FROM_IMAGE, $NOTE, $RANK, $PWD"; ls -d /tmp/rank-*')
    said = box.vjob("shell", "last", "--node", "local1", "--", *words).stdout
    inside = f"made of dough, of the conf, -1, {tmp_path}\n/tmp/rank-2\n/tmp/rank-3\n"
    assert said == inside, "the second node's"
    assert box.vjob("shell", "last", "--", "sh", "-c", "exit 7", code=7).stdout == ""
    box.vjob("cancel", "last", "--now")


def test_void_in_the_conf_reaches_the_hooks_of_an_image_that_asks_for_gpus(
    tmp_path: Path, image: Path, scratch: Path, tools: Tools
) -> None:
    """The hook read the image's own `all`, and failed where there is no driver."""
    root = tmp_path / "asks"
    subprocess.run(["cp", "-a", image.parent / "root", root], check=False)
    with (root / "etc/environment").open("a") as file:
        file.write("NVIDIA_VISIBLE_DEVICES=all\n")
    box = Box("enroot", tmp_path, str(root), scratch, tools.path)
    [row, *_] = box.look("env: {NVIDIA_VISIBLE_DEVICES: void}\n")
    assert row["env"]["NVIDIA_VISIBLE_DEVICES"] == "void"

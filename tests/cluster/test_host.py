"""A laptop without Slurm's tools, and the lab behind a real sshd."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob, wait_for
from tests.varuna_core.launch.sshd import SSHD, Sshd
from vjob.jobs.process import ENTRY

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install openssh-server"),
]
CONF = """
name: far
program: {script: train.py}
cluster: {scheduler: slurm, walltime_min: 5, grace_s: 2,
          nodes: [{group: all, count: 2, queue: gpu1}]}
"""
TRAIN = "import time\nprint('step 1/2 loss 0.5', flush=True)\ntime.sleep(300)\n"


def test_a_run_of_the_lab_is_submitted_seen_and_cancelled_from_a_laptop(
    clean_lab: Lab, tmp_path: Path
) -> None:
    home, laptop = tmp_path / "home", tmp_path / "laptop"
    home.mkdir()
    laptop.mkdir()
    there = {
        name: value
        for name, value in {**clean_lab.env, "XDG_STATE_HOME": str(home / "state")}.items()
        if os.environ.get(name) != value
    }
    settings = " ".join(f"{name}={value}" for name, value in there.items())
    sshd = Sshd(tmp_path / "sshd", f"SetEnv {settings}")
    try:
        command = f"HOME={home} {sys.executable} {ENTRY}"
        ssh = f"ssh -F {sshd.config} -p {sshd.port}"
        env = {"VJOB_SSH": ssh, "VJOB_HOST_COMMAND": command, "VJOB_HOST": "localhost"}
        vjob = Vjob(laptop, {**env, "PATH": os.environ["PATH"]})
        (laptop / "train.py").write_text(TRAIN)
        vjob.write(CONF)
        run = json.loads(vjob("submit", "conf.yaml", "--json").stdout)
        assert run["folder"].startswith(f"{home}/vjob/laptop-")
        assert run["jobs"][0] in clean_lab.run(["squeue", "-h", "-o", "%i"]).stdout.split()
        wait_for(
            lambda: "step 1/" in vjob("logs", "last", code=None).stdout,
            120,
            lambda: vjob("status", "last", code=None).stdout,
        )
        vjob("cancel", "last", "--now")
        found = json.loads(vjob("status", "last", "--json", code=None).stdout)
        assert found["verdict"]["health"] == "CANCELLED"
    finally:
        sshd.stop()

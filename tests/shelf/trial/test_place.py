"""A try on this machine takes the GPUs that the shell allows."""

from __future__ import annotations

from pathlib import Path

from tests.command import Vjob

CONF = """
name: picked
program: {script: train.py}
cluster: {scheduler: local, nodes: [{group: all, gpus: 4}]}
"""
SCRIPT = """
import os, sys
sys.exit("seen: " + os.environ["CUDA_VISIBLE_DEVICES"])
"""


def test_a_try_here_uses_the_visible_gpus_alone(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path, {"CUDA_VISIBLE_DEVICES": "6"})
    vjob.write(CONF)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "seen: 6" in vjob("try", "conf.yaml", "--here", code=1).stdout

"""docs/quickstart.md, the part on a laptop: its conf and its commands, as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.documents import find_commands

PART = (ROOT / "docs/quickstart.md").read_text().partition("## On Slurm")[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stranger_gets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("torch")
    (conf,) = re.findall(r"```yaml\n(.*?)```", PART, re.DOTALL)
    (tmp_path / "first.yaml").write_text(conf)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, *blocks = re.findall(r"```sh\n(.*?)```", PART, re.DOTALL)
    said: dict[str, str] = {}
    for words in (words for block in blocks for words in find_commands(block)):
        done = subprocess.run(
            [sys.executable, "-m", "vjob", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        said[words[0]] = done.stdout
    assert "resumed from iteration 30" in said["submit"]
    assert "idle" in said["report"] and "parallel.pipeline" in said["compare"]

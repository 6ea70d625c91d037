"""The examples of docs/plugins.md, installed as distributions of their own and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.toys import build_environment, install_toy

PAGE = (ROOT / "docs/plugins.md").read_text()
BLOCKS = re.compile(r"^```python\n(.*?)^```\n\n^```ini\n(.*?)^```", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\[options\.entry_points\]\n(vjob\.\w+) =\n +(\S.*)$", re.MULTILINE)
LOG = " iteration {0:8}/ 20 | elapsed time per iteration (ms): 1{0}.5 | lm loss: 6.{0}E+00 |\n"
Vjob = Callable[..., str]


def install(folder: Path, group: str) -> None:
    """Install the example of a group."""
    for source, ini in BLOCKS.findall(PAGE):
        found = ROW.search(ini)
        if found is not None and found[1] == group:
            install_toy(folder, group, found[2], source)
            return
    raise AssertionError(f"no example of {group}")


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    def run(group: str, *words: str, code: int | None = 0, path: str = "") -> str:
        if not (tmp_path / group).exists():
            install(tmp_path / group, group)
        env = build_environment(tmp_path, tmp_path / group)
        env["PATH"] = path + os.environ["PATH"]
        done = subprocess.run(
            [sys.executable, ROOT / "vjob/__main__.py", *words],
            env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder that `vjob report` reads."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "n060.out").write_text("".join(map(LOG.format, (10, 20))))
    return folder


def test_each_group_has_a_row() -> None:
    from varuna_core.plugins import GROUPS

    assert sorted(re.findall(r"^\| `(vjob\.\w+)`", PAGE, re.MULTILINE)) == sorted(GROUPS)


def test_a_command(vjob: Vjob) -> None:
    assert vjob("vjob.commands", "toy") == "wheee\n"


def test_a_finding_stands_in_the_report(vjob: Vjob, logs: Path, tmp_path: Path) -> None:
    said = vjob("vjob.findings", "report", str(logs), "--text")
    assert "logs was played with." in " ".join(said.split())
    (tmp_path / "vjob.findings/toy_finding.py").write_text(
        "def count_nodes(job, analysis): raise ValueError('broken')\ncount_nodes.API = 1\n"
    )
    said = vjob("vjob.findings", "report", str(logs), "--text")
    assert "plug-in toy of vjob.findings is ignored: ValueError: broken" in said


def test_a_known_line_is_explained(vjob: Vjob, tmp_path: Path) -> None:
    write_conf(tmp_path, "")
    (tmp_path / "train.py").write_text("raise SystemExit('ToyError: spring 3')\n")
    vjob("vjob.known_lines", "submit", "conf.yaml", "--follow", code=1)
    said = " ".join(vjob("vjob.known_lines", "status", "last", "--once", code=None).split())
    assert "a spring of the toy broke" in said
    assert "install a new spring" in said


def test_a_known_refusal_is_explained_at_submit(vjob: Vjob, tmp_path: Path) -> None:
    write_conf(tmp_path, "")
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: no toys' >&2; exit 1\n")
    sbatch.chmod(0o700)
    words = ("submit", "conf.yaml", "--set", "cluster.scheduler=slurm")
    said = vjob("vjob.known_lines", *words, code=1, path=f"{sbatch.parent}{os.pathsep}")
    assert "all toys are taken" in said


def test_an_export(vjob: Vjob, logs: Path, tmp_path: Path) -> None:
    said = vjob("vjob.exporters", "report", str(logs), "--export", "toy", "-o", "names.txt")
    assert said == "wrote names.txt\n"
    assert "steps" in (tmp_path / "names.txt").read_text().splitlines()
    assert "toy" in vjob("vjob.exporters", "report", "--help")


def test_an_importer(vjob: Vjob, tmp_path: Path) -> None:
    (tmp_path / "gpt.toy").write_text("play train\n")
    said = vjob("vjob.importers", "init", "--from", "gpt.toy")
    assert said == "name: gpt\nprogram: {script: train.py}\n"
    (tmp_path / "gpt.other").write_text("play train\n")
    vjob("vjob.importers", "init", "--from", "gpt.other", code=2)


def write_conf(folder: Path, text: str) -> None:
    (folder / "train.py").write_text("print('iteration 1 loss 2.5', flush=True)\n")
    (folder / "conf.yaml").write_text(
        "name: toy\nprogram: {script: train.py}\n"
        "cluster: {scheduler: local, walltime_min: 2, nodes: [{group: all, count: 1, ranks: 1}]}\n"
        + text
    )


def test_a_container_runtime_is_a_name_in_the_conf(vjob: Vjob, tmp_path: Path) -> None:
    (tmp_path / "image/bin").mkdir(parents=True)
    write_conf(tmp_path, f"container: {{runtime: toy, image: {tmp_path}/image}}\n")
    said = vjob("vjob.container_runtimes", "submit", "conf.yaml", "--dry-run")
    assert "toybox" in said
    said = vjob("vjob.findings", "submit", "conf.yaml", "--dry-run", code=2)
    assert "container.runtime = toy: must be one of auto" in said


def test_a_tracker_is_carried_to_the_node_and_gets_its_settings(vjob: Vjob, tmp_path: Path) -> None:
    file = tmp_path / "points.txt"
    write_conf(tmp_path, f"track: {{plugins: {{toy: {{file: {file}}}}}}}\n")
    vjob("vjob.trackers", "submit", "conf.yaml", "--follow")
    (run,) = (path for path in (tmp_path / "log").iterdir() if path.name.startswith("toy-"))
    assert json.loads((run / "trackers.json").read_text()) == {"toy": {"file": str(file)}}
    assert file.exists(), [path.read_text() for path in run.rglob("track.log")]
    write_conf(tmp_path, "track: {plugins: {doll: {}}}\n")
    said = vjob("vjob.trackers", "submit", "conf.yaml", code=2)
    assert "is not an installed plug-in of vjob.trackers" in " ".join(said.split())

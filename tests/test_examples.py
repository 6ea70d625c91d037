"""Each example's conf makes scripts; the foreign model trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
NEED_DATA = {"tiny-gpt.yaml"}
"""Those whose data set the demo makes first."""


def preview(path: Path, *words: str) -> str:
    text = path.read_text()
    if "scheduler: local" not in text:
        words = (*words, "--set", "cluster.scheduler=slurm")
    if path.name in NEED_DATA:
        words = (*words, "--set", "data={synthetic: true}")
    done = CliRunner().invoke(cli, ["submit", str(path), "--dry-run", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_makes_scripts(path: Path) -> None:
    shown = preview(path)
    assert "# ---- node.sh" in shown
    assert ("# ---- training.json" in shown) is ("program: pretrain_" in path.read_text())


@pytest.mark.parametrize(
    ("hetero", "scripts"),
    [("hetjob", {"batch.sh"}), ("split", {"batch.master.sh", "batch.slave.sh"})],
)
def test_the_mixed_example_is_one_het_job_or_two_that_meet(hetero: str, scripts: set[str]) -> None:
    shown = preview(ROOT / "examples/gpt2-xl-mixed.yaml", "--set", f"cluster.hetero={hetero}")
    assert set(re.findall(r"# ---- (batch\S*)", shown)) == scripts


def test_the_usual_cases_have_an_example() -> None:
    text = "\n".join(path.read_text() for path in EXAMPLES)
    for words in ("model: gpt2-small", "0-11-8-8-8-8-5-0", 'gpus: "a100:4"', "model: bert-large"):
        assert words in text


def test_the_foreign_model_trains() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "examples/foreign.py", "--steps", "3"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0]

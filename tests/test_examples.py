"""Each example's conf makes scripts; the foreign model trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import ROOT
from vjob.shelf.commands.cli import cli

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.yaml"))
THEIRS = (
    "examples/data/demo_text_document",
    "data/wiki_text_document",
    "Megatron-LM/pretrain_gpt.py",
)
"""Files that the examples tell the user to have or to make, token files as prefixes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples, in a tree with what they need."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in THEIRS:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("",) if path.suffix else (".bin", ".idx"):
            path.with_name(path.name + suffix).touch()
    return tmp_path / "examples"


def preview(path: Path, *words: str) -> str:
    if "scheduler: local" not in path.read_text():
        words = (*words, "--set", "cluster.scheduler=slurm")
    done = CliRunner().invoke(cli, ["submit", str(path), "--dry-run", *words])
    assert done.exit_code == 0, done.output
    return done.output


def read_commented(text: str, name: str) -> dict[str, Any]:
    """A JSON file of a preview."""
    lines = text.partition(f"---- {name}\n")[2].partition("\n# ----")[0].splitlines()
    found: dict[str, Any] = json.loads("\n".join(line.removeprefix("# ") for line in lines))
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_makes_scripts(folder: Path, name: str) -> None:
    shown = preview(folder / name)
    assert "# ---- node.sh" in shown
    is_built_in = "program: pretrain_" in (folder / name).read_text()
    assert ("# ---- training.json" in shown) is is_built_in


@pytest.mark.parametrize(
    ("hetero", "scripts"),
    [("hetjob", {"batch.sh"}), ("split", {"batch.master.sh", "batch.slave.sh"})],
)
def test_the_mixed_example_is_one_het_job_or_two_that_meet(
    folder: Path, hetero: str, scripts: set[str]
) -> None:
    shown = preview(folder / "gpt2-xl-mixed.yaml", "--set", f"cluster.hetero={hetero}")
    assert set(re.findall(r"# ---- (batch\S*)", shown)) == scripts


def test_the_usual_cases_have_an_example() -> None:
    text = "\n".join((ROOT / "examples" / name).read_text() for name in EXAMPLES)
    for words in ("model: gpt2-small", "0-11-8-8-8-8-5-0", 'gpus: "a100:4"', "model: bert-large"):
        assert words in text


def test_the_megatron_example_has_the_layout_of_its_partition(folder: Path) -> None:
    text = preview(folder / "megatron.yaml")
    command = read_commented(text, "plan.json")["command"]
    assert command[2].endswith("Megatron-LM/pretrain_gpt.py")
    assert "E|t*11|t*8|t*8|t*8|t*8|t*5|L" in command
    assert re.search(r"#SBATCH --nodes=8\b", text)


def test_the_deepspeed_example_completes_its_file_by_the_conf(folder: Path) -> None:
    text = preview(folder / "deepspeed.yaml")
    assert read_commented(text, "plan.json")["command"][3] == "--local_rank=%{local_rank}"
    config = read_commented(text, "ds_config.json")
    assert config["train_batch_size"] == 64
    recompute = config["activation_checkpointing"]
    assert recompute["synchronize_checkpoint_boundary"] is True, "the file's"
    assert recompute["cpu_checkpointing"] is False, "the conf's"
    assert config["zero_optimization"] == {
        "stage": 2,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "reduce_bucket_size": 50000000,
        "allgather_bucket_size": 50000000,
    }


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


def test_the_tour_from_python_runs_as_it_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/from_python.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "DONE - the job ended well after step 12 of 12",
        "'hello: rank 3 of 4, node 1'",
        "[1, 4, 9]",
        "ValueError: no such corpus",
        "and came to 100",
        "COMPLETED",
    ):
        assert words in done.stdout, done.stdout
    begun = re.search(r"began the second time at (\d+)", done.stdout)
    assert begun and int(begun[1]) >= 10

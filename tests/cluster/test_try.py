"""`vjob try` on the lab's real Slurm: staged mistakes are found, healthy programs are not blamed.

Several tries run at once, each in a folder of its own: the lab has nodes for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob
from tests.small_training import write_text
from tests.staged_mistakes import MISTAKES, Mistake, write_mistake

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

AT_ONCE = 4


NODES = [{"group": "all", "count": 2, "queue": "gpu2", "ranks": 1}]
SLURM: Mapping[str, Any] = {"cluster": {"scheduler": "slurm", "nodes": NODES}}
TINY = """
name: tiny
program: pretrain_gpt
model: {layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}
data: {prefix: text, split: "8,2,0"}
train:
  steps: 5000
  global_batch_size: 8
  micro_batch_size: 2
  checkpoint: {folder: checkpoints, every: 50}
parallel: {pipeline: 2, data: 2}
cluster:
  scheduler: slurm
  hetero: hetjob
  nodes:
    - {group: first, count: 1, queue: gpu1, ranks: 2}
    - {group: second, count: 2, queue: gpu2, ranks: 1}
env: {OMP_NUM_THREADS: "1"}
"""
BARS = """
import os, sys, time
for step in range(1, 401):
    time.sleep(0.1)
    if os.environ["RANK"] == "0":
        sys.stderr.write(f"\\rtraining: {step / 4:3.0f}%|###| {step}/400 [00:01<00:40, 9.8it/s]")
        sys.stderr.flush()
"""


def try_out(env: Mapping[str, str], folder: Path, write: Callable[[Path], None]) -> dict[str, Any]:
    folder.mkdir()
    write(folder)
    vjob = Vjob(folder, env)
    file = folder / "limit"
    limit = file.read_text() if file.exists() else "600"
    words = ["try", "conf.yaml", "--queue", "gpu2", "--json", "--limit", f"{limit}s"]
    done = vjob(*words, code=None, timeout_s=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = {**json.loads(done.stdout), "code": done.returncode}
    return found


def stage(mistake: Mistake, folder: Path) -> None:
    write_mistake(folder, mistake, SLURM)
    (folder / "limit").write_text(str(mistake.limit_s))


def write_bars(folder: Path) -> None:
    write_mistake(folder, None, SLURM)
    (folder / "train.py").write_text(BARS)


def write_tiny(folder: Path) -> None:
    write_text(folder)
    (folder / "conf.yaml").write_text(TINY)


@pytest.mark.parametrize("number", [3, pytest.param(len(MISTAKES), marks=pytest.mark.long)])
def test_mistakes_are_found_and_healthy_programs_are_not_blamed(
    clean_lab: Lab, tmp_path: Path, number: int
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    healthy: dict[str, Callable[[Path], None]] = {
        "healthy lines": lambda folder: write_mistake(folder, None, SLURM),
        "healthy bars": write_bars,
        "healthy built-in program": write_tiny,
    }
    mistakes = dict(list(MISTAKES.items())[-number:])
    staged = {name: partial(stage, mistake) for name, mistake in mistakes.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {
            name: pool.submit(try_out, clean_lab.env, tmp_path / str(number), write)
            for number, (name, write) in enumerate({**healthy, **staged}.items())
        }
        found = {name: job.result() for name, job in jobs.items()}
    for name in healthy:
        assert found[name]["findings"] == [] and found[name]["code"] == 0, (name, found[name])
    rows = {row["name"]: row for row in found["healthy built-in program"]["rows"]}
    assert rows["checkpoint"]["values"]["saved"], rows
    missed = {}
    for name, mistake in mistakes.items():
        causes = [finding["cause"] for finding in found[name]["findings"]]
        if not any(all(word in cause for word in mistake.cause) for cause in causes):
            missed[name] = found[name]
    assert not missed, json.dumps(missed, indent=1)


def test_without_a_queue_a_node_of_the_confs_own_is_taken(clean_lab: Lab, tmp_path: Path) -> None:
    vjob = Vjob(tmp_path, clean_lab.env)
    write_mistake(tmp_path, None, SLURM)
    found = json.loads(vjob("try", "conf.yaml", "--json", "--keep").stdout)
    plan = json.loads((Path(found["files"]) / "plan.json").read_text())
    assert [(group["queue"], group["count"], group["ranks"]) for group in plan["groups"]] == [
        ("gpu2", 1, 2)
    ]
    assert vjob("list").stdout.count("try-") == 1

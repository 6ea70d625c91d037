"""`vjob status`, `logs` and `stacks` of jobs that plain sbatch made on the lab's Slurm."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob, wait_for

pytestmark = pytest.mark.slurm
LOOP = """
import sys, time
for step in range(1, 2001):
    time.sleep(0.1)
    print(f"step {step}/2000 loss {4 / step:.4f}", flush=True)
"""


class Slurm:
    """sbatch as a user without vjob types it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        (folder / "steps.py").write_text(LOOP)
        folder.chmod(0o755)

    def submit(self, *words: str) -> str:
        command = ["sbatch", "--parsable", f"--chdir={self.folder}", *words]
        return self.lab.run(command).stdout.strip().partition(";")[0]

    def train(self, *words: str) -> str:
        return self.submit("-p", "gpu2", *words, "--wrap", f"{sys.executable} steps.py")


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


@pytest.fixture
def slurm(clean_lab: Lab, tmp_path: Path) -> Slurm:
    return Slurm(clean_lab, tmp_path)


def look(vjob: Vjob, job: str) -> dict[str, Any]:
    found: dict[str, Any] = vjob.status(job)
    return found


def test_jobs_of_plain_sbatch_are_known_by_their_ids(vjob: Vjob, slurm: Slurm) -> None:
    loop = slurm.train("-N2", "-J", "my steps", "-o", "%x-%5j.out", "-e", "%j.%N.err")
    array = slurm.submit("-p", "gpu2", "-a", "3-4", "--wrap", "echo I am $SLURM_ARRAY_TASK_ID")
    het = slurm.submit("-p", "gpu2", ":", "-p", "gpu1", "--wrap", "echo both; sleep 300")
    never = slurm.submit("-p", "gpu2", "-N9", "--wrap", "hostname")
    held = slurm.submit("-p", "gpu2", "--hold", "--wrap", "hostname")
    fails = slurm.submit(
        "-p", "gpu2", "--wrap", "echo torch.OutOfMemoryError: CUDA out of memory; exit 3"
    )
    theirs = slurm.submit("-p", "gpu2", "--uid=nobody", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_for(lambda: (look(vjob, loop)["progress"] or {}).get("step", 0) > 20, 120)

    found = look(vjob, loop)
    assert (found["verdict"]["health"], found["progress"]["num_steps"]) == ("HEALTHY", 2000)
    assert "left" not in found["verdict"]["reason"]  # its lines have no times
    assert (slurm.folder / f"my steps-{int(loop):05}.out").exists()
    assert "loss" in vjob("logs", loop, "-n", "3").stdout
    assert list(slurm.folder.glob(f"{loop}.b*.err"))

    wait_for(lambda: look(vjob, array)["verdict"]["health"] == "DONE", 120)
    said = vjob("logs", array).stdout
    assert f"{array}_3 | I am 3" in said and f"{array}_4 | I am 4" in said
    assert "I am 3" not in vjob("logs", f"{array}_4").stdout

    wait_for(lambda: "both" in vjob("logs", het).stdout, 120)
    found = look(vjob, het)
    assert [row["id"] for row in found["scheduler"]["jobs"]] == [f"{het}+0", f"{het}+1"]
    assert found["verdict"]["health"] == "RUNNING"
    assert "steps not known" in found["verdict"]["reason"]

    for job, word, next_step in (
        (never, "PartitionNodeLimit", "scancel"),
        (held, "JobHeldUser", "scontrol release"),
    ):
        found = vjob.status(job)["verdict"]
        assert (found["health"], found["exit_code"]) == ("PENDING", 12)
        assert word in found["reason"] and next_step in found["advice"]
        assert "cluster." not in found["reason"] + found["advice"]
    assert "has printed nothing yet" in vjob("logs", never).stdout

    wait_for(lambda: look(vjob, fails)["verdict"]["health"] == "DEAD", 120)
    assert "exit code 3" in look(vjob, fails)["verdict"]["reason"]
    assert "CUDA out of memory" in vjob("logs", fails, "--errors").stdout

    found = look(vjob, theirs)
    assert found["scheduler"]["jobs"][0]["state"] == "RUNNING"
    assert "belongs to nobody" in found["message"]
    assert "belongs to user nobody" in vjob("stacks", theirs, code=2).stderr

    slurm.lab.run(["scancel", loop, theirs])
    wait_for(lambda: look(vjob, loop)["verdict"]["health"] == "CANCELLED", 120)
    assert "no run '99999'" in vjob("status", "99999", code=2).stderr


def test_py_spy_sees_the_processes_of_a_plain_job(vjob: Vjob, slurm: Slurm) -> None:
    if not os.access(Path(sys.executable).with_name("py-spy"), os.X_OK):
        pytest.skip("py-spy is not installed")
    job = slurm.submit(
        "-p", "gpu2", "-N2", "--ntasks-per-node=1", "--wrap", f"srun {sys.executable} steps.py"
    )
    wait_for(lambda: "step 5" in vjob("logs", job).stdout, 120)
    said = vjob("stacks", job).stdout
    assert re.search(r"2 of 2 ranks", said) and "steps.py" in said, said

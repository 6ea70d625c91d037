"""vjob and submitit from Python on the real Slurm of the lab, a program each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob
from vjob.jobs.schedulers.slurm.commands import build_squeue_command

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

OURS = PROGRAMS / "from_python"
REPORT = str(PROGRAMS / "report_rank.py")


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


def run(vjob: Vjob, program: str, *words: str) -> tuple[dict[str, Any], str]:
    """What the program printed last, and its standard error."""
    done = subprocess.run(
        [sys.executable, str(OURS / program), *words],
        cwd=vjob.folder, env=vjob.env, capture_output=True, text=True, timeout=350, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


@pytest.mark.parametrize(
    ("layout", "jobs", "world"), [("plain", 1, 4), ("het", 1, 5), ("split", 2, 5)]
)
def test_a_conf_is_submitted_and_watched_to_its_end(
    vjob: Vjob, layout: str, jobs: int, world: int
) -> None:
    found, _ = run(vjob, "conf_to_the_end.py", layout, REPORT)
    assert found["code"] == 0 and found["state"] == "COMPLETED" and found["health"] == "DONE"
    assert (found["jobs"], found["world"], found["results"]) == (jobs, world, [None] * world)
    assert json.loads(found["rank 0 said"].splitlines()[0])["note"] == "from Python"
    assert found["rank 1 said"] == ""
    assert found["grace_s"] == 3 and found["lines"] > world
    # The command line sees the same run, by id and by name.
    for word in (found["job"], f"py-{layout}"):
        assert vjob.status(word)["verdict"]["health"] == "DONE"


def test_a_function_on_a_het_job_returns_rank_and_host_of_every_rank(vjob: Vjob) -> None:
    found, _ = run(vjob, "het_function.py")
    rows = found["results"]
    assert [row["rank"] for row in rows] == [*range(7)]
    assert [row["local_rank"] for row in rows] == [0, 1, 0, 1, 0, 1, 2]
    assert [row["node"] for row in rows] == [0, 0, 1, 1, 2, 2, 2]
    assert all(row["host"].startswith("b") for row in rows[:4])
    assert all(row["host"].startswith("a") for row in rows[4:])
    assert {(row["world"], row["nodes"], row["job"]) for row in rows} == {(7, 3, found["job"])}
    assert len({row["MASTER_ADDR"] for row in rows}) == 1
    assert {row["mark"] for row in rows} == {"m"} and len({str(row["hosts"]) for row in rows}) == 1
    assert [row["RANK"] for row in rows] == [str(rank) for rank in range(7)]


def test_an_array_of_six_runs_two_at_once_and_het_jobs_one_by_one(vjob: Vjob) -> None:
    found, said = run(vjob, "six_calls.py")
    assert found["products"] == [0, 10, 20, 30, 40, 50]
    base = found["ids"][0].partition("_")[0]
    assert found["ids"] == [f"{base}_{number}" for number in range(6)]
    assert found["most"] <= 2
    assert found["pairs"] == [[0, 0], [1, 1]] and "_" not in "".join(found["pair ids"])
    assert "Slurm has no arrays of het jobs" in said
    assert vjob.status(found["ids"][4])["verdict"]["health"] == "DONE"


def test_failing_and_killed_ranks_are_named_with_host_and_message(vjob: Vjob) -> None:
    found, _ = run(vjob, "failures.py")
    raised, killed = found["fail"], found["die"]
    assert raised["kind"] == "FailedJobError" and raised["raised"] and raised["state"] == "FAILED"
    for word in ("rank 3", raised["hosts"], "ValueError: the learning rate is -1", "in fail"):
        assert word in raised["text"], raised["text"]
    assert "varuna_core" not in raised["text"]
    assert killed["kind"] == "UncompletedJobError" and killed["raised"]
    for word in ("rank 1", killed["hosts"], "SIGKILL", "about to go"):
        assert word in killed["text"], killed["text"]


def test_cancel_ends_a_job_and_lets_one_that_can_save_first(vjob: Vjob) -> None:
    found, _ = run(vjob, "cancelled.py")
    assert found["plain"]["state"] == "CANCELLED", found
    assert "cancelled with vjob cancel" in found["plain"]["text"]
    assert (
        "cancelled with vjob cancel: rank 0" in found["saves"]["message"] and found["count"] > 0
    ), found
    assert found["waiting"]["state"] == "CANCELLED", found


@pytest.mark.long
def test_a_preempted_count_goes_on_where_it_was(vjob: Vjob) -> None:
    found, _ = run(vjob, "preempted.py")
    (done, starts), _ = found["results"]
    assert done == 60 and found["state"] == "COMPLETED" and found["attempts"] >= 2
    assert starts[0] == 0 and len(starts) >= 2 and all(start > 0 for start in starts[1:]), found


def test_python_and_the_command_line_know_each_others_runs(vjob: Vjob) -> None:
    conf = f"""
name: theirs
program: {{script: {REPORT}}}
cluster:
  walltime_min: 3
  nodes: [{{group: all, count: 2, queue: gpu2}}]
"""
    theirs = vjob.submit(conf)
    found, _ = run(vjob, "known_elsewhere.py", "theirs", REPORT)
    assert (found["name"], found["state"], found["health"]) == (theirs.name, "COMPLETED", "DONE")
    assert json.loads(found["logs"].splitlines()[0].partition("| ")[2] or found["logs"])
    assert found["same"] and found["runs"] == [theirs.name, found["mine"]] and not found["bad"]
    assert vjob.status(found["mine"])["verdict"]["health"] == "DONE"


def test_a_hundred_jobs_are_watched_by_one_squeue(vjob: Vjob, tmp_path: Path) -> None:
    """squeue is counted by a script of its name before the real one on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    real = subprocess.run(
        ["which", "squeue"], env=vjob.env, capture_output=True, text=True, check=True
    ).stdout.strip()
    for name in ("squeue", "scontrol", "sacct"):
        tool = tools / name
        tool.write_text(
            f'#!/bin/sh\necho {name} >> {tmp_path}/calls\nexec {Path(real).with_name(name)} "$@"\n'
        )
        tool.chmod(0o755)
    vjob.env["PATH"] = f"{tools}:{vjob.env['PATH']}"
    found, _ = run(vjob, "hundred.py")
    assert found["states"] == ["PENDING"] * 100
    calls = found["calls"]
    assert calls.count("squeue") <= found["intervals"] + 1 and len(calls) == calls.count("squeue")
    assert build_squeue_command(0)[0] == "squeue"

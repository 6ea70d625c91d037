"""Chains and sweeps on the real Slurm of the lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_jobs import conf, usually, wait_ready
from tests.command import PROGRAMS, Vjob, read_out, read_rank, wait_for
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.slurm
ONE = "    - {group: one, count: 1, queue: gpu2, cpus: 1}"
HANG = ["-1", "hang", "catch"]


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


def read_state(vjob: Vjob, run: RunFolder) -> str:
    return str(vjob.status(run.name)["state"])


@pytest.mark.parametrize("layout", usually("single", "split"))
def test_a_run_starts_once_all_of_the_one_before_has_ended_well(vjob: Vjob, layout: str) -> None:
    done = vjob.folder / "done"
    first = vjob.submit(conf("fail_as_told.py", [*HANG, "leave", str(done)], layout))
    wait_ready(vjob, first, 12 if layout == "single" else 16)
    run = vjob.submit(conf(nodes=ONE), "--after", first.name)
    wait_for(lambda: "waits for" in vjob.status(run.name)["verdict"]["reason"], 60)
    said = vjob("status", run.name).stdout
    assert f"the job waits for {first.name} to end well" in said
    done.touch()
    assert vjob.wait_over(first)["verdict"] == "COMPLETED"
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)


@pytest.mark.parametrize("layout", usually("split"))
def test_a_run_never_starts_after_a_bad_end_and_says_why(
    vjob: Vjob, clean_lab: Lab, layout: str
) -> None:
    first = vjob.submit(conf("fail_as_told.py", HANG, layout))
    wait_ready(vjob, first, 12 if layout == "single" else 16)
    run = vjob.submit(conf(nodes=ONE), "--after", first.name)
    others = [
        vjob.submit(conf(nodes=ONE), "--after-any", first.name),
        vjob.submit(conf(nodes=ONE), "--after", run.name),
    ]
    record = read_record(first)
    assert record is not None
    clean_lab.run(["scancel", *(job.id for job in record.jobs)])
    record_of = {each.name: vjob.wait_over(each) for each in (run, *others)}
    assert record_of[run.name]["message"].startswith(
        f"never started: {first.name}, which it waited for, did not end well ("
    )
    assert record_of[others[0].name]["verdict"] == "COMPLETED"
    assert record_of[others[1].name]["message"] == (
        f"never started: {run.name}, which it waited for, did not end well (CANCELLED)"
    )
    assert not run.attempts() and not others[1].attempts()


@pytest.mark.parametrize("layout", ["hetjob", pytest.param("split", marks=pytest.mark.long)])
def test_all_parts_of_a_run_wait_and_go_together(vjob: Vjob, clean_lab: Lab, layout: str) -> None:
    """Options on sbatch's command line are of a het job's first component alone."""
    first = vjob.submit(conf("fail_as_told.py", HANG, nodes=ONE))
    wait_ready(vjob, first, 1)
    text = conf("report_rank.py", layout=layout)
    run, other = vjob.submit(text, "--after", "last"), vjob.submit(text, "--after-any", first.name)
    record = read_record(first)
    assert record is not None
    clean_lab.run(["scancel", record.jobs[0].id])
    assert "never started" in vjob.wait_over(run)["message"]
    assert vjob.wait_over(other)["verdict"] == "COMPLETED", vjob.explain(other)
    wait_for(lambda: not clean_lab.run(["squeue", "-h"]).stdout.strip(), 60)


def test_a_run_goes_on_waiting_while_the_one_before_is_requeued(vjob: Vjob, clean_lab: Lab) -> None:
    done = vjob.folder / "done"
    told = [*HANG, "leave", str(done)]
    first = vjob.submit(conf("fail_as_told.py", told, requeue=True, nodes=ONE))
    wait_ready(vjob, first, 1)
    run = vjob.submit(conf(nodes=ONE), "--after", first.name)
    record = read_record(first)
    assert record is not None
    clean_lab.run(["scontrol", "requeue", record.jobs[0].id])
    wait_ready(vjob, first, 1, attempt=1)
    assert "ready" not in read_out(run) and read_state(vjob, run) == "PENDING"
    done.touch()
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)


def test_a_run_never_starts_after_one_that_saved_as_it_was_cancelled(vjob: Vjob) -> None:
    """Its ranks exited 0, and its batch script does not: Slurm's afterok sees that."""
    first = vjob.submit(conf("fail_as_told.py", HANG, nodes=ONE))
    wait_ready(vjob, first, 1)
    run = vjob.submit(conf(nodes=ONE), "--after", first.name)
    assert "left after it was asked to save" in vjob("cancel", first.name).stdout
    assert vjob.wait_over(first)["verdict"] == "CANCELLED"
    assert "did not end well (CANCELLED)" in vjob.wait_over(run)["message"]
    assert not run.attempts()


@pytest.mark.long
def test_what_slurm_has_forgotten_needs_no_wait(vjob: Vjob) -> None:
    first = vjob.submit(conf(nodes=ONE))
    vjob.wait_over(first)
    run = vjob.submit(conf(nodes=ONE), "--after", first.name, "--after-any", first.name)
    assert vjob.wait_over(run)["verdict"] == "COMPLETED"


def test_a_sweep_never_runs_more_at_once_than_it_may(vjob: Vjob, clean_lab: Lab) -> None:
    name = vjob.write(conf("fail_as_told.py", HANG, nodes=ONE))
    vjob("submit", name, "--sweep", "cluster.grace_s=3,4,5,6", "--at-most", "2",
         "--sweep-name", "graces")  # fmt: skip
    runs = [RunFolder(vjob.folder / f"log/graces-{number}") for number in (1, 2, 3, 4)]
    alive: set[str] = set()
    for ended in range(3):
        started = runs[: ended + 2]
        for run in started:
            wait_ready(vjob, run, 1)
        said = clean_lab.run(["squeue", "-h", "-t", "running", "-o", "%i"]).stdout.split()
        assert len(said) == 2, "nodes are free for all four"
        alive.update(said)
        assert not any(run.attempts() for run in runs[ended + 2 :])
        if ended < 2:
            assert "left after it was asked" in vjob("cancel", runs[ended].name).stdout
    assert len(alive) == 4
    assert "2 runs are cancelled, 2 of the runs after" in vjob("cancel", "--sweep", "graces").stdout


def test_a_sweep_with_a_refused_run_leaves_no_job(vjob: Vjob, clean_lab: Lab) -> None:
    name = vjob.write(conf("fail_as_told.py", HANG, nodes=ONE))
    said = vjob("submit", name, "--sweep", "cluster.nodes[0].queue=gpu2,all,nowhere",
                "--sweep-name", "queues", code=1).stderr  # fmt: skip
    assert "run 3 of 3" in said and "The 2 runs before it were withdrawn" in said
    wait_for(lambda: not clean_lab.run(["squeue", "-h"]).stdout.strip(), 60)
    rows = json.loads(vjob("list", "--sweep", "queues", "--json").stdout)
    assert [row["state"] for row in rows] == ["REFUSED"] * 3


def test_a_sweep_of_twenty_is_one_array(vjob: Vjob, clean_lab: Lab) -> None:
    (vjob.folder / "quick.py").write_text("import sys; print(sys.argv[1])")
    text = conf(nodes=ONE).replace(str(PROGRAMS / "report_rank.py"), "quick.py")
    values = ",".join(f"v{number}" for number in range(1, 21))
    options = ["--sweep", f"program.args={values}", "--sweep-name", "twenty", "--at-most", "8"]
    said = vjob("submit", vjob.write(text), *options).stdout
    array = said.partition("one array: ")[2].partition(")")[0]
    ids = [f"{array}_{number}" for number in range(1, 21)]
    rows = json.loads(vjob("list", "--sweep", "twenty", "--json").stdout)
    assert [job for row in rows for job in row["jobs"]] == ids
    for number in range(1, 21):
        run = RunFolder(vjob.folder / f"log/twenty-{number}")
        assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
        assert read_rank(run, 0).strip() == f"v{number}"

    def is_kept() -> bool:  # sacct is told of an end some time after it
        found = clean_lab.run(["sacct", "-n", "-P", "-X", "-o", "JobID,State"]).stdout.split()
        return {f"{job}|COMPLETED" for job in ids} <= set(found)

    wait_for(is_kept, 60)


def test_one_run_of_an_array_and_all_of_it_are_cancelled(vjob: Vjob, clean_lab: Lab) -> None:
    name = vjob.write(conf("fail_as_told.py", HANG, nodes=ONE))
    vjob("submit", name, "--sweep", "cluster.grace_s=3,4,5", "--at-most", "2", "--sweep-name", "g")
    one, two, three = (RunFolder(vjob.folder / f"log/g-{number}") for number in (1, 2, 3))
    for run in (one, two):
        wait_ready(vjob, run, 1)
    assert read_state(vjob, three) == "PENDING"
    vjob("cancel", "g-1")
    wait_ready(vjob, three, 1)
    assert read_state(vjob, two) == "RUNNING"
    assert "2 runs are cancelled" in vjob("cancel", "--sweep", "g").stdout
    assert not clean_lab.run(["squeue", "-h"]).stdout.strip()

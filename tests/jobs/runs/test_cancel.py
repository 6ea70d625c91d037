"""Cancels that fail, and runs whose folders are gone while their jobs go on: Slurm is stubs."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs.stub_programs import StubPrograms
from tests.varuna_core.agent.local_run import make_plan
from varuna_core.records import record as records
from varuna_core.records.plan import write_plan
from varuna_core.records.record import (
    JobRecord,
    RunRecord,
    is_cancel_asked,
    read_record,
    write_record,
)
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.stacks.collect import collect_stacks
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import find_run, view_run
from vjob.jobs.runs.listing import list_runs, render
from vjob.jobs.schedulers import run_index as index

AWAY = 'sys.exit("slurm error: Unable to contact slurm controller (connect failure)")'


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubPrograms:
    stubs = StubPrograms(tmp_path)
    monkeypatch.setenv("PATH", stubs.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return stubs


def make_run(folder: Path, run: str, *jobs: str) -> RunFolder:
    made = RunFolder(folder / "log" / run)
    made.path.mkdir(parents=True)
    write_plan(made.plan, make_plan())
    write_record(
        made,
        RunRecord(
            run=run,
            name="demo",
            scheduler="slurm",
            layout="single" if len(jobs) == 1 else "split",
            num_jobs=len(jobs),
            state=records.SUBMITTED,
            submitted=time.time() - 60,
            jobs=tuple(JobRecord(id=job, group=None) for job in jobs),
            user="u",
            host="elsewhere",
            conf="conf.yaml",
            version="0",
            pid=1,
            pid_start=None,
        ),
    )
    index.add_run(made, "demo")
    for job in jobs:
        index.add_job(made, job)
    return made


def test_the_list_says_from_where_a_run_goes_on(tmp_path: Path, stubs: StubPrograms) -> None:
    """A checkpoint from before the run is another run's, which this one may not have loaded."""
    run = make_run(tmp_path, "demo-1", "7")
    write_plan(run.plan, make_plan(env={"VJOB_CHECKPOINT": str(tmp_path)}))
    record = read_record(run)
    assert record is not None
    record = replace(record, state=records.ENDED, verdict="FAILED", message="rank 0 exited 1")
    write_record(run, record)
    tracker = tmp_path / "latest"
    tracker.write_text("global_step40")
    assert list_runs(None)[0]["message"] == "rank 0 exited 1; submit again to continue from step 40"
    os.utime(tracker, (1.0, 1.0))
    assert list_runs(None)[0]["message"] == "rank 0 exited 1"


def answer(stubs: StubPrograms, *rows: str) -> None:
    """squeue prints these rows; scontrol knows nothing."""
    stubs.add("squeue", f"print({chr(10).join(rows)!r})")
    stubs.add("scontrol", 'sys.exit("slurm_load_jobs error: Invalid job id specified")')
    stubs.add("sacct")


def row(job: str, run: str, state: str = "RUNNING") -> str:
    return f"{job}|0|N/A|{state}|n1|None|0|N/A|vjob:{run}|5:00|10:00|N/A|N/A|(null)|0|"


def test_a_cancel_that_failed_is_not_believed_later(tmp_path: Path, stubs: StubPrograms) -> None:
    """The controller was away; what ends the job the day after is a plain scancel."""
    run = make_run(tmp_path, "demo-1", "7")
    for tool in ("squeue", "scontrol", "scancel", "sacct"):
        stubs.add(tool, AWAY)
    with pytest.raises(VjobError, match=r"demo-1 could not be cancelled: .*Unable to contact"):
        cancel_run(run, now=True, wait_s=1, say=str)
    assert not is_cancel_asked(run)
    asked = len(stubs.calls("squeue")) + len(stubs.calls("scontrol"))
    assert asked == 1 and len(stubs.calls("scancel")) == 1, "a controller that is away is slow"

    answer(stubs, row("7", "demo-1", "CANCELLED"))
    stubs.add("scancel")
    with pytest.raises(InputError, match="over already: CANCELLED"):
        cancel_run(run, now=True, wait_s=5, say=str)


def test_stacks_say_that_the_scheduler_does_not_answer(tmp_path: Path, stubs: StubPrograms) -> None:
    """Not that the run does not run: nobody knows."""
    run = make_run(tmp_path, "demo-1", "7")
    for tool in ("squeue", "scontrol", "sacct"):
        stubs.add(tool, AWAY)
    with pytest.raises(VjobError, match=r"slurm does not answer.*Unable to contact") as found:
        collect_stacks(view_run(run, warn=False))
    assert not isinstance(found.value, InputError)


@pytest.mark.parametrize("word", ["last", "demo"])
def test_a_run_whose_folder_is_gone_is_no_older_one(
    tmp_path: Path, stubs: StubPrograms, word: str
) -> None:
    older, newer = (make_run(tmp_path, f"demo-{at}", str(at)) for at in (1, 2))
    answer(stubs, row("2", "demo-2"))
    assert find_run(word, tmp_path).path == newer.path
    shutil.rmtree(newer.path)
    with pytest.raises(InputError, match=r"folder of run demo-2 was removed.*scancel 2"):
        find_run(word, tmp_path)
    rows = list_runs(None)
    assert [(one["run"], one["jobs"], one["state"]) for one in rows][1:] == [
        ("demo-2", ["2"], "UNKNOWN")
    ]
    assert "scancel 2" in render(rows)
    answer(stubs, row("2", "demo-2", "COMPLETED"))
    assert find_run(word, tmp_path).path == older.path, "its job is over"
    assert len(list_runs(None)) == 1


def test_a_split_run_that_waits_for_a_job_of_its_own_pends(
    tmp_path: Path, stubs: StubPrograms
) -> None:
    """Its other job runs, and waits with all its nodes."""
    run = make_run(tmp_path, "demo-1", "7", "8")
    answer(stubs, row("7", "demo-1"), row("8", "demo-1", "PENDING"))
    assert view_run(run).state == "PENDING"
    run.attempt(0).make()
    run.attempt(0).go.write_text("{}")
    assert view_run(run).state == "RUNNING", "its ranks were started"


def test_no_scheduler_is_asked_where_no_folder_is_missing(
    tmp_path: Path, stubs: StubPrograms
) -> None:
    run = make_run(tmp_path, "demo-1", "7")
    answer(stubs)
    assert find_run("last", tmp_path).path == run.path
    assert stubs.calls("squeue") == []

"""Chains: a run that waits for others, on this machine, and as Slurm is asked for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import HOST, PROGRAMS, Vjob, read_out, wait_for
from tests.jobs.submit.test_submit import FakeSlurm
from varuna_core.records.files import read_json
from varuna_core.records.record import JobRecord, read_record, write_record
from varuna_core.records.runfolder import RunFolder

CONF = """
name: link
program: {{script: {script}, args: {args}}}
cluster: {{scheduler: {scheduler}, walltime_min: 2, grace_s: 2, nodes: {nodes}}}
"""
ONE = "[{group: m, ranks: 1}]"


def conf(*args: str, scheduler: str = "local", nodes: str = ONE) -> str:
    return CONF.format(
        script=PROGRAMS / "fail_as_told.py", args=json.dumps(args), scheduler=scheduler, nodes=nodes
    )


WELL, BADLY = ("-1", "hang", "catch"), ("0", "exit:3")


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "tools")


@pytest.fixture
def with_slurm(slurm: FakeSlurm, tmp_path: Path) -> Vjob:
    slurm.queue()
    return Vjob(tmp_path, {"PATH": f"{slurm.folder}:{os.environ['PATH']}"})


def start(vjob: Vjob, *args: str) -> RunFolder:
    """A run whose rank is there."""
    run = vjob.submit(conf(*args))
    wait_for(lambda: "ready" in read_out(run), 30, lambda: vjob.explain(run))
    return run


def count_runs(vjob: Vjob) -> int:
    return len(list(vjob.folder.glob("log/link-*")))


def test_a_run_waits_for_another_ones_good_end_and_says_so(vjob: Vjob) -> None:
    done = vjob.folder / "done"
    first = start(vjob, "-1", "hang", "leave", str(done))
    run = vjob.submit(conf("-1", "exit:0"), "--after", "last")
    wait_for(lambda: "Dependency" in vjob.status("last")["verdict"]["reason"], 30)
    said = vjob("status", "last").stdout
    assert f"the job waits for {first.name} to end well" in said
    assert f"next: wait; vjob status {first.name}" in said
    assert not run.attempts()
    said = vjob("submit", "conf.yaml", "--after", first.name, "--dry-run").stdout
    assert f"# It would start once {first.name} has ended well\n" in said
    done.touch()
    wait_for(lambda: "ready" in read_out(run), 30, lambda: vjob.explain(run))
    vjob("cancel", run.name, "--now")


@pytest.mark.parametrize("now", [["--now"], []], ids=["cancelled", "saved-and-cancelled"])
def test_a_run_that_needs_a_good_end_never_starts_after_a_bad_one(
    vjob: Vjob, now: list[str]
) -> None:
    """The record is written first by whoever looks, at whichever run of the chain."""
    first = start(vjob, *WELL)
    needs = vjob.submit(conf(*WELL), "--after", first.name)
    last = vjob.submit(conf(*WELL), "--after", needs.name)
    takes_any = vjob.submit(conf("-1", "exit:0"), "--after-any", first.name, "--after-any", "last")
    vjob("cancel", first.name, *now)
    assert vjob.wait_over(last)["verdict"] == "CANCELLED"
    for run, before in ((last, needs), (needs, first)):
        message = vjob.wait_over(run)["message"]
        assert message == (
            f"never started: {before.name}, which it waited for, did not end well (CANCELLED)"
        )
    assert not needs.attempts() and not last.attempts()
    said = vjob("status", needs.name, code=16).stdout
    assert "--after-any starts after any end" in said and "at no step" not in said
    wait_for(lambda: "ready" in read_out(takes_any), 30, lambda: vjob.explain(takes_any))
    vjob("cancel", takes_any.name, "--now")


def test_a_run_that_left_before_its_time_limit_is_no_good_end(vjob: Vjob) -> None:
    """It saved and exited 0 at step 120 of 400, and the run after it began as if it were done."""
    first = start(vjob, *WELL, "steps")
    needs = vjob.submit(conf(*WELL), "--after", first.name)
    wait_for(lambda: "step 120/400" in read_out(first), 30)
    os.kill(read_json(first.path / "local.json")["pid"], signal.SIGUSR1)
    assert vjob.wait_over(needs)["message"] == (
        f"never started: {first.name}, which it waited for, did not end well (TIMEOUT)"
    )
    said = vjob("status", first.name, code=10).stdout
    assert "stopped at step 120 of 400, as SIGUSR1 asked the run to save" in said
    assert "next: vjob submit again" in said or "submit again" in said
    assert "raise" not in said


def test_a_run_that_waits_can_be_cancelled(vjob: Vjob) -> None:
    first = start(vjob, *WELL)
    run = vjob.submit(conf(*WELL), "--after", "last")
    assert "is cancelled" in vjob("cancel", run.name).stdout
    assert vjob.wait_over(run)["message"] == "cancelled with vjob cancel before it started"
    assert vjob.status(first.name)["state"] == "RUNNING"
    vjob("cancel", first.name, "--now")


def test_a_supervisor_that_was_killed_is_no_good_end(vjob: Vjob) -> None:
    first = start(vjob, *WELL)
    run = vjob.submit(conf(*WELL), "--after", "last")
    state = read_json(first.path / "local.json")
    ranks = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_of(path, first)]
    os.kill(state["pid"], 9)
    assert "did not end well (FAILED)" in vjob.wait_over(run)["message"]
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def is_of(path: Path, run: RunFolder) -> bool:
    """True for a process of the run beside its supervisor."""
    try:
        words = (path / "cmdline").read_text()
        return str(run.path) in words + (path / "environ").read_text() and "supervisor" not in words
    except OSError:
        return False


def test_after_a_bad_end_nothing_is_submitted_and_after_any_is_named(vjob: Vjob) -> None:
    run = vjob.submit(conf(*BADLY))
    vjob.wait_over(run)
    said = vjob("submit", "conf.yaml", "--after", run.name, code=2).stderr
    assert f"{run.name} has ended FAILED: rank 0 on {HOST} exited 3" in said
    assert "use --after-any to start anyway" in said
    assert count_runs(vjob) == 1, "nothing is written"
    again = vjob.submit(conf("-1", "exit:0"), "--after-any", run.name)
    wait_for(lambda: "ready" in read_out(again), 30, lambda: vjob.explain(again))
    assert read_record(again).after_any == (str(run.path),)  # type: ignore[union-attr]
    vjob("cancel", again.name, "--now")


def test_a_word_that_names_no_run_is_refused_before_anything_is_written(vjob: Vjob) -> None:
    said = vjob("submit", vjob.write(conf(*WELL)), "--after", "nothing", code=2).stderr
    assert "no run 'nothing' is known" in said and count_runs(vjob) == 0


def test_slurm_is_asked_to_wait_for_every_job_of_a_run(with_slurm: Vjob, slurm: FakeSlurm) -> None:
    vjob, one = with_slurm, conf("-1", "exit:0", scheduler="slurm")
    run = vjob.submit(one)
    record = read_record(run)
    assert record is not None
    write_record(run, replace(record, jobs=(JobRecord("71", "m"), JobRecord("72", "s"))))
    vjob("submit", "conf.yaml", "--after", run.name)
    assert "--dependency=afterok:71:72 --kill-on-invalid-dep=yes" in slurm.asked()
    vjob("submit", "conf.yaml", "--after-any", run.name)
    assert "--dependency=afterany:71:72 " in slurm.asked()


def test_slurm_is_not_asked_to_wait_for_what_has_ended_well(
    with_slurm: Vjob, slurm: FakeSlurm
) -> None:
    vjob = with_slurm
    run = vjob.submit(conf("-1", "exit:0", scheduler="slurm"))
    record = read_record(run)
    assert record is not None
    write_record(run, replace(record, state="ended", verdict="COMPLETED"))
    vjob("submit", "conf.yaml", "--after", run.name)
    assert "--dependency" not in slurm.asked()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"state": "refused", "message": "no such queue"}, "was refused: no such queue"),
        ({"state": "intent", "jobs": ()}, "its job is not known yet"),
        ({"scheduler": "local"}, "is a run of this machine, but this one would be of Slurm"),
    ],
)
def test_a_run_that_cannot_be_waited_for_refuses_the_submit_and_says_why(
    with_slurm: Vjob, slurm: FakeSlurm, change: dict[str, object], word: str
) -> None:
    vjob = with_slurm
    run = vjob.submit(conf("-1", "exit:0", scheduler="slurm"))
    record = read_record(run)
    assert record is not None
    write_record(run, replace(record, **change))  # type: ignore[arg-type]
    calls = slurm.asked().count("sbatch")
    assert word in vjob("submit", "conf.yaml", "--after", run.name, code=2).stderr
    assert slurm.asked().count("sbatch") == calls and count_runs(vjob) == 1


def test_a_record_of_before_there_were_chains_is_read(vjob: Vjob) -> None:
    run = vjob.submit(conf("-1", "exit:0"))
    vjob("cancel", run.name, "--now", code=None)
    value = json.loads(run.record.read_text())
    for key in ("after", "after_any", "sweep", "swept"):
        del value[key]
    run.record.write_text(json.dumps(value))
    record = read_record(run)
    assert record is not None and (record.after, record.sweep, record.swept) == ((), "", {})

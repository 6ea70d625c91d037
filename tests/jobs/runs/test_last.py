"""`last`, and who cancelled a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from varuna_core.records.record import REFUSED, SUBMITTED, JobRecord, RunRecord, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.runs import find
from vjob.jobs.schedulers import run_index
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.slurm.commands import parse_canceller
from vjob.jobs.schedulers.slurm.scheduler import SlurmScheduler

Make = Callable[[str, str], RunFolder]
RECORD = RunRecord(
    run="r", name="n", state=SUBMITTED, scheduler="slurm", layout="single", num_jobs=1,
    jobs=(JobRecord(id="77", group=None),), submitted=0.0, user="u", host="h", conf="c",
    version="0", pid=0, pid_start=None,
)  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(name: str, state: str) -> RunFolder:
        run = RunFolder(tmp_path / name)
        run.path.mkdir()
        write_record(run, replace(RECORD, run=name, state=state))
        run_index.add_run(run, "n")
        return run

    return make


def test_last_passes_over_refused_runs_and_says_so(
    make_run: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    going = make_run("going", SUBMITTED)
    assert find.find_run("last", tmp_path).path == going.path and not caplog.messages
    make_run("bad", REFUSED)
    make_run("worse", REFUSED)
    with caplog.at_level(logging.WARNING):
        assert find.find_run("last", tmp_path).path == going.path
    (said,) = caplog.messages
    assert "worse and 1 more" in said and said.endswith("means going")


def test_where_all_runs_were_refused_last_is_the_newest(make_run: Make, tmp_path: Path) -> None:
    make_run("bad", REFUSED)
    newest = make_run("worse", REFUSED)
    assert find.find_run("last", tmp_path).path == newest.path


def test_last_of_no_runs_says_how_to_make_one(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no runs yet; `vjob submit"):
        find.find_run("last", tmp_path)


def test_accounting_names_who_cancelled_a_job() -> None:
    assert parse_canceller("12|CANCELLED by 1000|a1|None|0:0|start|\n") == 1000
    assert parse_canceller("12|RUNNING|a1|CANCELLED by|0:0|start|\n") is None


@pytest.mark.parametrize(("name", "said"), [("ann", "cancelled by ann"), ("", "cancelled")])
def test_a_run_that_another_cancelled_says_who_did(
    make_run: Make, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(SlurmScheduler, "ask_canceller", lambda self, job: name)
    run = make_run("going", SUBMITTED)
    over = SchedulerJob(id="77", state=JobState.CANCELLED, native_word="CANCELLED")
    (run.path / "attempt-0").mkdir()
    ended = find.record_end(run, RECORD, [over])
    assert (ended.verdict, ended.message) == ("CANCELLED", said)


@pytest.mark.parametrize("word", ["n", "gone", "L7"])
def test_a_run_whose_folder_went_is_told_from_an_unknown_one(
    make_run: Make, tmp_path: Path, word: str
) -> None:
    run = make_run("gone", SUBMITTED)
    run_index.add_job(run, "L7")
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"gone, was moved or deleted: after a move give its new"):
        find.find_run(word, tmp_path)
    with pytest.raises(InputError, match="no run 'other' is known"):
        find.find_run("other", tmp_path)

"""`vjob prune`: what goes, what stays, and that nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.jobs.runs.test_outcome import make_record
from varuna_core.records.files import append_line, write_json
from varuna_core.records.record import ENDED, INTENT, REFUSED, SUBMITTED, RunRecord, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import UncertainError
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.shelf import prune as pruning
from vjob.shelf.commands.cli import cli

DAY_S = 86400


class FakeScheduler:
    """Knows one job that lives, and the runs whose jobs are in the queue."""

    def __init__(self) -> None:
        self.orphans: dict[str, list[SchedulerJob]] = {}
        self.answers = True

    def poll(self, jobs: list[str], **options: object) -> dict[str, list[SchedulerJob]]:
        return {
            job: [SchedulerJob(id=job, state=JobState.RUNNING, native_word="RUNNING")]
            for job in jobs
        }

    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        if not self.answers:
            raise UncertainError("squeue timed out")
        return self.orphans


class Runs:
    """A folder of logs with runs of many kinds, and the command on it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.log.mkdir()
        self.index = folder / "state" / "vjob" / "runs.jsonl"
        self.index.parent.mkdir(parents=True)
        self.scheduler = FakeScheduler()

    def add(self, run_id: str, days: float = 40, **changes: Any) -> RunFolder:
        """A run in which nothing was written for so many days."""
        run = RunFolder(self.log / run_id)
        attempt = run.attempt(0)
        run.path.mkdir()
        attempt.make()
        (attempt.path / "n0.out").write_bytes(b"x" * 5000)
        moment = time.time() - days * DAY_S
        whole: RunRecord = replace(
            make_record(run), state=ENDED, verdict="COMPLETED", submitted=moment - 60
        )
        write_record(run, replace(whole, **changes))
        append_line(self.index, {"run": run_id, "name": "demo", "path": str(run.path)})
        age(run, days)
        return run

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(cli, ["prune", *words], catch_exceptions=False)

    def kept(self, *words: str) -> dict[str, str]:
        """Why each run stays; empty for one that goes."""
        rows = json.loads(self(*words, "--json").stdout)
        return {row["run"]: row["kept"] for row in rows}


def age(run: RunFolder, days: float) -> None:
    moment = time.time() - days * DAY_S
    for path in run.path.rglob("*"):
        os.utime(path, (moment, moment), follow_symlinks=False)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = Runs(tmp_path)
    monkeypatch.setattr(schedulers, "get_scheduler", lambda name, run=None: found.scheduler)
    yield found


def list_all(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_it_lists_and_removes_nothing_until_it_is_asked_to(runs: Runs) -> None:
    runs.add("old")
    before = list_all(runs.log)
    said = runs().stdout
    assert "old" in said and "COMPLETED" in said and "40 d" in said and "--delete" in said
    assert list_all(runs.log) == before


def test_an_old_run_goes_and_a_new_one_stays(runs: Runs) -> None:
    old, new = runs.add("old"), runs.add("new", days=5)
    assert "1 run removed" in runs("--delete").stdout
    assert not old.path.exists() and new.attempt(0).path.is_dir()
    assert sorted(path.name for path in runs.log.iterdir()) == ["new"]
    assert "nothing to remove" in runs("--delete").stdout


def test_a_run_in_which_something_was_written_lately_is_no_old_one(runs: Runs) -> None:
    """Its end may be young though its start is not."""
    long = runs.add("long")
    (long.attempt(0).path / "n0.out").write_text("the last line")
    assert "newer" in runs.kept()["long"]


def test_what_lives_or_is_not_known_stays(runs: Runs) -> None:
    runs.add("alive", state=SUBMITTED, verdict="")
    runs.add("submitting", state=INTENT, verdict="", host="elsewhere", submitted=time.time())
    runs.add("lost", verdict="UNKNOWN")
    runs.add("again")
    runs.add("refused", state=REFUSED, verdict="")
    runs.scheduler.orphans["again"] = [
        SchedulerJob(id="7", state=JobState.PENDING, native_word="PENDING")
    ]
    kept = runs.kept("--days", "0")
    assert kept["refused"] == ""
    assert "has not ended" in kept["alive"] and "has not ended" in kept["submitting"]
    assert "or how the run ended" in kept["lost"] and "in the queue" in kept["again"]
    runs.scheduler.answers = False
    assert "does not answer" in runs.kept("--days", "0")["refused"]


def test_a_run_that_another_one_waits_for_stays(runs: Runs) -> None:
    first = runs.add("first")
    runs.add("next", state=SUBMITTED, verdict="", after=(str(first.path),))
    assert "waits for this run" in runs.kept()["first"]


def leave_checkpoint(run: RunFolder) -> None:
    folder = run.path / "ckpt" / "varuna_ckpt_20"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def leave_weights(run: RunFolder) -> None:
    (run.path / "model.pt").write_text("weights")


def leave_output(run: RunFolder) -> None:
    run.code.mkdir()
    (run.code / "train.py").write_text("")
    (run.code / "scores.csv").write_text("1")
    write_json(run.code_files, {"files": ["train.py"], "links": []})


def leave_result(run: RunFolder) -> None:
    run.result_pickle(0).parent.mkdir()
    run.result_pickle(0).write_text("a result")


@pytest.mark.parametrize("leave", [leave_checkpoint, leave_weights, leave_output, leave_result])
def test_what_ranks_left_stays_unless_it_is_asked_for(
    leave: Callable[[RunFolder], None], runs: Runs
) -> None:
    run = runs.add("trained")
    leave(run)
    age(run, 40)
    assert "its ranks left" in runs.kept()["trained"]
    runs("--delete")
    assert run.path.is_dir()
    runs("--delete", "--checkpoints")
    assert not run.path.exists()


def test_code_that_was_copied_at_submit_is_no_output(runs: Runs) -> None:
    run = runs.add("copied")
    (run.code / "__pycache__").mkdir(parents=True)
    for name in ("train.py", "start.pt", "__pycache__/train.pyc"):
        (run.code / name).write_text("x")
    write_json(run.code_files, {"files": ["train.py", "start.pt"], "links": []})
    age(run, 40)
    assert runs.kept()["copied"] == ""


def test_no_link_is_followed(runs: Runs, tmp_path: Path) -> None:
    store = tmp_path / "ckpt"
    store.mkdir()
    (store / "precious").write_text("x")
    run = runs.add("linked")
    (run.path / "ckpt").symlink_to(store)
    age(run, 40)
    (runs.log / "4711").symlink_to(run.path)
    elsewhere = tmp_path / "elsewhere"
    runs.add("moved").path.rename(elsewhere)
    (runs.log / "moved").symlink_to(elsewhere)
    runs(str(runs.log), "--delete")
    assert not run.path.exists() and (store / "precious").read_text() == "x"
    assert elsewhere.is_dir(), "a link in the folder of logs is not a run of it"
    runs("--delete")
    assert elsewhere.is_dir() and (runs.log / "moved").is_symlink()


def test_a_run_of_another_user_stays(runs: Runs) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    run = runs.add("theirs")
    os.chown(run.path, 65534, 65534)
    assert "another user" in runs.kept()["theirs"]
    runs("--delete")
    runs(str(runs.log), "--delete")
    assert run.attempt(0).path.is_dir()


def test_the_newest_of_each_name_may_stay(runs: Runs) -> None:
    for number in range(4):
        runs.add(f"a{number}", days=50 - number, name="a")
    runs.add("b0", days=90, name="b")
    kept = runs.kept("--keep", "2")
    assert [name for name, why in kept.items() if not why] == ["a0", "a1"]


def test_an_interrupted_removal_leaves_each_run_whole_or_gone(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["one", "two", "three"]
    whole = {name: list_all(runs.add(name).path) for name in names}
    real, calls = shutil.rmtree, []

    def remove(path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            (path / "record.json").unlink()
            raise KeyboardInterrupt
        real(path, **options)

    monkeypatch.setattr(pruning.shutil, "rmtree", remove)
    done = runs("--delete")
    assert done.exit_code == 130 and "1 run removed" in done.stderr
    left = {path.name for path in runs.log.iterdir() if not path.name.startswith(".")}
    assert len(left) == 1 and all(list_all(runs.log / name) == whole[name] for name in left)
    assert set(runs.kept()) == left, "what is half removed is no run any more"
    monkeypatch.undo()
    os.environ["XDG_STATE_HOME"] = str(runs.index.parents[1])
    runs(str(runs.log), "--delete")
    assert not [path for path in runs.log.iterdir() if path.name.startswith(".")]


def test_a_run_that_changed_meanwhile_stays(runs: Runs) -> None:
    run = runs.add("back")
    (chosen,) = pruning.choose_runs(pruning.Wanted(days=30))
    write_record(run, replace(make_record(run), state=SUBMITTED))
    assert "changed since" in pruning.remove_run(chosen)
    assert run.path.is_dir()


def test_a_run_is_no_folder_of_logs(runs: Runs) -> None:
    run = runs.add("one")
    done = runs(str(run.path), "--delete")
    assert done.exit_code == 2 and "is a run, not a folder of logs" in done.stderr
    assert run.path.is_dir()

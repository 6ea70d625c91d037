"""`vjob submit --like JOB`: the same again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import vjob as face
from tests.command import Vjob
from tests.jobs.programs.code.repositories import commit, git, make_repository
from tests.jobs.submit.test_snapshot import code_of, find_word
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.submit.like import find_hidden

CONF = """
name: again
program: {script: train.py, args: ["1"], snapshot: MODE}
cluster: {scheduler: local, nodes: [{group: m}]}
"""
TRAIN = """
import os, sys
print("RAN", "old", *sys.argv[1:], os.environ.get("MY_TOKEN", "-"), os.environ.get("NOTE", "-"))
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    vjob = Vjob(tmp_path / "home")
    make_repository(vjob.folder, DOTgitignore="state/\nlog/\nconf.yaml\n", train_py=TRAIN)
    return vjob


def run_first(vjob: Vjob, mode: str, more: str = "", *options: str) -> RunFolder:
    run = vjob.submit(CONF.replace("MODE", mode) + more, *options)
    vjob.wait_over(run)
    return run


def run_again(vjob: Vjob, first: RunFolder, *options: str) -> RunFolder:
    said = vjob("submit", "--like", str(first.path), "--json", *options).stdout
    run = RunFolder(Path(json.loads(said)["folder"]))
    vjob.wait_over(run)
    return run


def test_the_code_of_a_copy_runs_again_though_the_users_own_is_gone(vjob: Vjob) -> None:
    (vjob.folder / "train.py").write_text(TRAIN + "# changed\n")
    first = run_first(vjob, "copy", "", "--set", 'program.args=["2"]')
    (first.code / "left_by_a_rank").write_text("")
    git(vjob.folder, "rm", "-q", "-f", "train.py")
    second = run_again(vjob, first)
    assert find_word(second, "RAN") == "RAN old 2 - -"
    assert (second.code / "train.py").read_text() == TRAIN + "# changed\n"
    assert not (second.code / "left_by_a_rank").exists()
    assert code_of(second) == code_of(first)
    assert second.code_diff.read_text() == first.code_diff.read_text()
    assert second.conf.read_text() == first.conf.read_text()
    third = run_again(vjob, second, "--set", 'program.args=["3"]')
    plan = read_plan(third.plan)
    assert plan is not None and plan.command[-2:] == (f"{third.code}/train.py", "3")


@pytest.mark.parametrize(
    "program", ["{script: train.py}", "{module: train}", "{command: python train.py}"]
)
def test_a_run_again_is_started_as_it_was(vjob: Vjob, program: str) -> None:
    text = CONF.replace('{script: train.py, args: ["1"], snapshot: MODE}', program)
    first = vjob.submit(text)
    vjob.wait_over(first)
    (vjob.folder / "train.py").write_text(TRAIN.replace('"old"', '"new"'))
    second = run_again(vjob, first)
    plans = [read_plan(run.plan) for run in (first, second)]
    assert [plan.launch for plan in plans if plan is not None] == ["python", "python"]
    assert find_word(second, "RAN") == "RAN old - -"


def test_without_a_copy_todays_code_runs_and_a_difference_is_told(vjob: Vjob) -> None:
    first = run_first(vjob, "none")
    again = ("submit", "--like", str(first.path), "--dry-run")
    assert "vjob:" not in vjob(*again).stderr
    (vjob.folder / "train.py").write_text(TRAIN.replace("old", "new"))
    assert "and files have changed since" in vjob(*again).stderr
    commit(vjob.folder)
    said = vjob(*again).stderr
    assert f"{first.name} ran " in said and "but the code is now " in said
    second = run_again(vjob, first)
    assert find_word(second, "RAN").startswith("RAN new")


def test_a_copy_can_be_put_aside_for_todays_code(vjob: Vjob) -> None:
    first = run_first(vjob, "copy")
    (vjob.folder / "train.py").write_text(TRAIN.replace("old", "new"))
    said = vjob("submit", "--like", "last", "--set", "program.snapshot=none", "--dry-run").stdout
    assert f"{vjob.folder}/train.py" in said and first.name not in said


def test_a_dry_run_says_which_code_and_writes_nothing(vjob: Vjob) -> None:
    first = run_first(vjob, "auto")
    before = sorted(vjob.folder.rglob("*"))
    shown = vjob("submit", "--like", first.name, "--dry-run").stdout
    assert "# Its code: a copy of 2 files" in shown
    assert sorted(vjob.folder.rglob("*")) == before


def test_secrets_are_to_be_given_again(vjob: Vjob) -> None:
    first = run_first(vjob, "none", "env: {MY_TOKEN: mine, NOTE: kept}\n")
    said = vjob("submit", "--like", str(first.path), code=2).stderr
    assert "--set env.MY_TOKEN=..." in said and "pass_env=[MY_TOKEN]" in said
    second = run_again(vjob, first, "--set", "env.MY_TOKEN=other")
    assert find_word(second, "RAN") == "RAN old 1 other kept"
    vjob.env["MY_TOKEN"] = "shell"
    third = run_again(vjob, first, "--set", "pass_env=[MY_TOKEN]")
    assert find_word(third, "RAN") == "RAN old 1 shell kept"


def test_hidden_parts_are_found_wherever_they_are() -> None:
    value = {"env": {"A": "<redacted>", "B": "b"}, "setup": ["x", "curl -H X: <redacted>"], "n": 1}
    assert list(find_hidden(value)) == ["env.A", "setup[1]"]


def test_a_conf_or_a_job_is_given_and_not_both(vjob: Vjob) -> None:
    name = vjob.write(CONF.replace("MODE", "none"))
    for words in ((), (name, "--like", "last")):
        assert "give a conf, or --like JOB" in vjob("submit", *words, code=2).stderr
    first = run_first(vjob, "none")
    said = vjob("submit", "--like", str(first.path), "--sweep", "env.X=1,2", code=2).stderr
    assert "a sweep needs a conf" in said


def test_a_run_whose_conf_is_gone_cannot_be_done_again(vjob: Vjob) -> None:
    first = run_first(vjob, "none")
    first.resolved.unlink()
    said = vjob("submit", "--like", str(first.path), code=2).stderr
    assert "no record.json and resolved.yaml that can be read" in said


def test_a_copy_that_was_deleted_is_todays_code(vjob: Vjob) -> None:
    first = run_first(vjob, "copy")
    shutil.rmtree(first.code)
    second = run_again(vjob, first)
    assert (second.code / "train.py").read_text() == TRAIN


def test_python_submits_a_job_again_too(vjob: Vjob, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_first(vjob, "copy")
    monkeypatch.setenv("XDG_STATE_HOME", vjob.env["XDG_STATE_HOME"])
    monkeypatch.chdir(vjob.folder)
    (vjob.folder / "train.py").write_text(TRAIN.replace("old", "new"))
    job = face.submit(like=str(first.path), set={"program.args": ["7"]}, name="seventh")
    job.wait()
    assert find_word(RunFolder(Path(job.folder)), "RAN") == "RAN old 7 - -"
    assert job.folder.name.startswith("seventh-")
    with pytest.raises(InputError, match="give a conf, or a job"):
        face.submit()

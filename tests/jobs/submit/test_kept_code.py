"""A run keeps which code it ran, and on which packages."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.command import Vjob
from tests.jobs.programs.code.repositories import commit, make_repository, write_files
from varuna_core.records.record import format_commit, read_record

CONF = """
name: kept
program: {script: src/train.py}
cluster: {scheduler: local, nodes: [{group: m}]}
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    vjob = Vjob(tmp_path)
    make_repository(tmp_path, DOTgitignore="state/\n", src__train_py="print('one')\n")
    vjob.write(CONF)
    commit(tmp_path)
    return vjob


def test_a_run_of_a_dirty_tree_has_the_commit_and_the_change(vjob: Vjob, tmp_path: Path) -> None:
    write_files(tmp_path, src__train_py="TOKEN = 'mine'\nprint('two')\n")
    run = vjob.submit(CONF)
    record = read_record(run)
    assert record is not None and record.code is not None
    assert record.code.dirty and record.code.branch == "main"
    diff = run.code_diff.read_text()
    assert "+print('two')" in diff and "mine" not in diff
    assert stat.S_IMODE(os.stat(run.code_diff).st_mode) == 0o600
    assert any(line.startswith("click==") for line in run.packages.read_text().splitlines())
    vjob.wait_over(run)
    assert f"commit {format_commit(record.code)}" in vjob("status", str(run.path)).stdout
    assert vjob.status(str(run.path))["commit"].endswith("on main, dirty")


def test_a_run_of_a_clean_tree_has_no_diff_though_run_folders_lie_in_it(vjob: Vjob) -> None:
    vjob.wait_over(vjob.submit(CONF))
    run = vjob.submit(CONF)
    record = read_record(run)
    assert record is not None and record.code is not None
    assert (record.code.dirty, record.code.untracked) == (False, 0)
    assert not run.code_diff.exists()
    vjob.wait_over(run)


def test_jobs_of_two_commits_differ_in_that(vjob: Vjob, tmp_path: Path) -> None:
    runs = [vjob.submit(CONF)]
    vjob.wait_over(runs[0])
    write_files(tmp_path, src__train_py="print('two')\n")
    runs.append(vjob.submit(CONF))
    vjob.wait_over(runs[1])
    names = [str(run.path) for run in runs]
    found = json.loads(vjob("compare", *names, "--json").stdout)
    first, second = found["differences"]["commit"]
    assert first.endswith("on main") and "on main, dirty (" in second


def test_a_run_outside_of_git_has_nothing_of_it(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path, {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    write_files(tmp_path, src__train_py="")
    run = vjob.submit(CONF)
    record = read_record(run)
    assert record is not None and record.code is None
    assert not run.code_diff.exists()
    vjob.wait_over(run)

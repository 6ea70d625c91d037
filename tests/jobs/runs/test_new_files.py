"""New files beside the script, in the run's copy of the code, are named when the run is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from varuna_core.facts.remedy import Context
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.model.snapshot import NewFiles
from vjob.jobs.monitor.rules.remarks import remark_new_files
from vjob.jobs.monitor.rules.words import render_advice, render_sentence
from vjob.jobs.runs import new_files


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    (run.code / "lib").mkdir(parents=True)
    (run.code / "train.py").write_text("pass")
    (run.code / "lib" / "a.py").write_text("pass")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big").write_text("of the user's")
    (run.code / "data").symlink_to(tmp_path / "data")
    listed = {"files": ["train.py", "lib/a.py"], "links": ["data"]}
    run.code_files.write_text(json.dumps(listed))
    return run


def write(run: RunFolder, name: str, size: int) -> None:
    path = run.code / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def test_a_copy_as_it_was_submitted_has_no_new_files(run: RunFolder) -> None:
    write(run, "lib/__pycache__/a.cpython-311.pyc", 9)
    assert new_files.find_new_files(run) is None
    run.code_files.unlink()
    assert new_files.find_new_files(run) is None, "a run without a copy"


def test_new_files_are_named_the_largest_first(run: RunFolder) -> None:
    write(run, "out/small.txt", 1)
    write(run, "lib/model.pt", 100)
    assert new_files.find_new_files(run) == NewFiles(
        folder=str(run.code), names=("lib/model.pt", "out/small.txt"), num_files=2
    )


def test_a_huge_copy_is_looked_at_in_part(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, "out/small.txt", 1)
    monkeypatch.setattr(new_files, "MOST_ENTRIES", 1)
    assert new_files.find_new_files(run) is None


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("m.pt",), "1 new file is in this run's copy of the code, where the next run does not "),
        (("m.pt", "b"), "2 new files are in this run's copy of the code, where the next run does"),
    ],
)
def test_the_remark_says_what_to_do(names: tuple[str, ...], says: str) -> None:
    files = NewFiles(folder="/log/r/code", names=names, num_files=len(names))
    (found,) = remark_new_files(files)
    said = render_sentence(found)
    assert said.startswith(says) and said.endswith("/log/r/code/m.pt")
    assert render_advice(found, Context.LOCAL, "r") == (
        "add a folder outside of the code to program.args for files to keep, and "
        "copy the new files to that folder"
    )

"""Words that are no job, log or output are refused, in a line that says what to give."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click
import pytest

from tests.command import Vjob
from vjob.shelf.commands.cli import MEANT, SEAM, cli

CASES = {
    ("report", "train.py"): "train.py is not a log: give a job, a run folder, a folder of logs, or",
    ("report", "my.yaml", "--text"): "my.yaml is not a log",
    ("compare", "train.py", "my.yaml"): "train.py is not a log",
    ("report", "n1.out", "-o", "/nonexist/x.html"): "the folder /nonexist does not exist",
    ("report", "n1.out", "--export", "perfetto", "-o", "no/x.json"): "the folder no does not exist",
    ("compare", "n1.out", "n1.out", "-o", "no/x.html"): "the folder no does not exist",
    ("plan", "my.yaml", "--write", "no/plan.json"): "the folder no does not exist",
    ("status", ""): "JOB is empty: give a job id",
    ("logs", " "): "JOB is empty: give a job id",
    ("report", ""): "JOB is empty: give a job id",
    ("cancel", ""): "JOB is empty: give a job id",
    ("check", "my.yaml"): "Did you mean 'vjob submit CONF --dry-run'?",
    ("kill", "last"): "Did you mean 'vjob cancel JOB'?",
    ("init", "--from", "train.py"): "train.py is not supported by --from",
}


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_it_is_refused_and_nothing_is_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    vjob = Vjob(tmp_path)
    vjob.write("import torch\nprint('hi')\n", "train.py")
    vjob.write("name: a\nprogram: {script: train.py}\n", "my.yaml")
    vjob.write("step 1/2 loss 1.0\nstep 2/2 loss 0.5\n", "n1.out")
    before = {*tmp_path.iterdir(), tmp_path / "state"}
    done = vjob(*words, code=2)
    assert CASES[words] in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout and {*tmp_path.iterdir(), tmp_path / "state"} == before


def test_a_word_of_another_tool_hides_no_command_and_leads_to_one() -> None:
    names = set(SEAM.list_names())
    assert not MEANT.keys() & names
    assert {words.split()[0] for words in MEANT.values()} <= names


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.EIO, "/far/a: Input/output error: the disk or its server failed; run the"),
        (errno.ESTALE, "/far/a: Stale file handle: the disk or its server failed"),
        (errno.EDQUOT, "/far/a: Disk quota exceeded; make room there, then run the command again"),
        (errno.EROFS, "/far/a: Read-only file system"),
        (errno.EACCES, "/far/a: Permission denied"),
    ],
)
def test_a_disk_that_fails_anywhere_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, told: str
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code), "/far/a")

    monkeypatch.setattr(SEAM, "load", lambda name: click.Command(name, callback=fail))
    with pytest.raises(SystemExit) as ended:
        cli.main(["list"])
    assert ended.value.code == 1
    assert told in " ".join(capsys.readouterr().err.split())

"""The words that a conf starts, against those that a script has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Vjob
from tests.shelf.importers.shell_conf_tree import SCRIPTS
from vjob.shelf.importers.bash.recording import Word
from vjob.shelf.importers.compare import Comparison, Difference, compare_words, render_comparison


def spell(one: Difference) -> str:
    pair = [" ".join(words) for words in (one.script, one.conf) if words]
    return f"{one.change.value} {' | '.join(dict.fromkeys(pair))}"


@pytest.mark.parametrize(
    ("script", "conf", "wanted"),
    [
        ("", "", []),
        ("a --lr 0.1 --fp16", "a --lr 0.1 --fp16", []),
        ("--lr 0.1 --balance 11-13", "--lr 0.1", ["missing --balance 11-13"]),
        ("--lr 0.1", "--seed 1 --lr 0.1", ["added --seed 1"]),
        ("--lr .1 --fp16", "--lr 0.1 --fp16", ["changed --lr .1 | --lr 0.1"]),
        ("--lr=0.1", "--lr 0.1", ["changed --lr=0.1 | --lr 0.1"]),
        ("--a --b 1 --c", "--c --a --b 1", ["moved --c"]),
        ("--a 1 --a 2", "--a 2", ["missing --a 1"]),
        ("--a x y", "--a x", ["changed --a x y | --a x"]),
        ("data --a", "other --a", ["changed data | other"]),
        ("--a -1", "--a -2", ["changed --a -1 | --a -2"]),
    ],
)
def test_words_are_compared_by_option(script: str, conf: str, wanted: list[str]) -> None:
    found = compare_words([Word(word) for word in script.split()], conf.split())
    assert [spell(one) for one in found] == wanted


@pytest.mark.parametrize(
    ("conf", "wanted"),
    [
        (["--run", "7", "--lr", "1"], []),
        (["--lr", "1"], ["missing --run $SLURM_JOB_ID"]),
        (["--run", "7", "8", "--lr", "1"], ["changed --run $SLURM_JOB_ID | --run 7 8"]),
    ],
)
def test_a_word_that_only_the_job_knows_may_be_any(conf: list[str], wanted: list[str]) -> None:
    job = Word("$SLURM_JOB_ID", frozenset({"SLURM_JOB_ID"}))
    found = compare_words([Word("--run"), job, Word("--lr"), Word("1")], conf)
    assert [spell(one) for one in found] == wanted


def test_a_dry_run_is_checked_against_the_folder_of_its_scripts(tmp_path: Path) -> None:
    for name, text in {**SCRIPTS, "_00_pretrain_gpt.py": ""}.items():
        (tmp_path / name).write_text(text)
    vjob = Vjob(tmp_path, {"HOME": "/home/kim"})
    vjob.write(vjob("init", "--from", ".").stdout)
    check = ("submit", "conf.yaml", "--dry-run", "--check-against", ".")
    assert "_00_pretrain_gpt.py, " in (said := vjob(*check).stdout) and "no difference" in said

    changed = ("--set", "parallel.partition=2-2", "--set", "train.steps=7")
    said = vjob(*check, *changed, code=1).stdout
    assert ": 2 differences\n" in said
    assert "  changed  --train-iters 6  ->  --train-iters 7\n" in said
    assert "  changed  --balance 3-1  ->  --balance 2-2\n" in said
    found = json.loads(vjob(*check, *changed, "--json", code=1).stdout)
    assert found["is_equal"] is False and found["differences"][1] == {
        "change": "changed", "script": ["--balance", "3-1"], "conf": ["--balance", "2-2"]
    }  # fmt: skip

    for words in (check[:2] + check[3:], (*check, "--sweep", "train.steps=1,2")):
        assert "--check-against needs --dry-run" in vjob(*words, code=2).stderr
    other = ("--set", "program.script=other.py")
    (tmp_path / "other.py").touch()
    assert "do not run python" in vjob(*check, *other, code=2).stderr


def test_a_comparison_names_what_only_the_job_knows() -> None:
    found = Comparison(place="line 3: t.py", words=4, open=("$1",), differences=())
    assert render_comparison(found, " ".join) == (
        "line 3: t.py, 4 words: no difference\n  open     $1: known only to the job or to you"
    )


def test_a_script_that_needs_arguments_gets_them(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    (tmp_path / "x.sh").write_text("#SBATCH -N 1\npython t.py --lr $1 --out r-$SLURM_JOB_ID $2\n")
    vjob = Vjob(tmp_path, {"HOME": "/home/kim"})
    vjob.write(vjob("init", "--from", "x.sh", "--", "0.1", "a b").stdout)
    check = ("submit", "conf.yaml", "--dry-run", "--check-against", "x.sh", "--")
    said = vjob(*check, "0.1", "a b").stdout  # the job's shell expands its number
    assert "t.py, 7 words: no difference" in said and "${SLURM_JOB_ID}" in said
    assert "changed  --lr 0.2  ->  --lr 0.1" in vjob(*check, "0.2", "a b", code=1).stdout
    said = vjob("submit", "conf.yaml", "--dry-run", "other.yaml", code=2).stderr
    assert "other.yaml: give one conf; only --check-against takes arguments" in said

"""`vjob --help`: grouped, each summary whole, at 80 columns; commands that take several jobs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.command import Vjob
from tests.test_docs import list_commands
from vjob.shelf.commands.cli import COMMANDS, cli


def get_help(*words: str) -> str:
    return CliRunner().invoke(cli, [*words, "--help"], terminal_width=80).output


@pytest.mark.parametrize(
    "words", [*list_commands(cli)], ids=lambda words: " ".join(words) or "vjob"
)
def test_help_fits_80_columns(words: tuple[str, ...]) -> None:
    assert [line for line in get_help(*words).splitlines() if len(line) > 80] == []


def test_summaries_are_whole_and_grouped() -> None:
    text = get_help()
    flat = " ".join(text.split())
    for title, commands in COMMANDS.items():
        assert f"\n{title}:\n" in text
        for command in commands:
            assert f"{command.name} {command.get_short_help_str(1000)}" in flat
    assert all("..." not in get_help(*words).partition("\n")[2] for words in [(), ("container",)])


@pytest.mark.parametrize("name", ["container", "data"])
def test_a_group_without_a_command_shows_its_help(name: str) -> None:
    said = CliRunner().invoke(cli, [name], terminal_width=80).output
    assert said.count("Usage: ") == 1
    assert "Error: " not in said
    assert said == get_help(name)


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def test_cancel_takes_several_jobs_and_says_how_each_ended(vjob: Vjob) -> None:
    """Each once, however it is named; a run that is over already is counted."""
    text = "program: {script: wait.py}\ncluster: {scheduler: local}\n"
    vjob.write("import time\nwhile True: time.sleep(1)\n", "wait.py")
    runs = [vjob.submit(f"name: r{number}\n{text}") for number in range(3)]
    vjob("cancel", "r0", "--now")
    done = vjob("cancel", "r0", "r1", str(runs[2].path), "r1", "--now", "--json")
    said = json.loads(done.stdout)
    assert said["message"] == "2 runs are cancelled; 1 was over already"
    assert [one["run"] for one in said["runs"]] == [run.name for run in runs]
    assert all(one["jobs"] and one["state"] != "RUNNING" for one in said["runs"])
    assert [os.path.basename(one["folder"]) for one in said["runs"]] == [run.name for run in runs]


def test_cancel_wants_jobs_or_a_sweep(vjob: Vjob) -> None:
    for words in ([], ["last", "--sweep", "x"]):
        assert "give a JOB, several, or --sweep NAME" in vjob("cancel", *words, code=2).stderr

"""`vjob --help`: grouped, each summary whole, at 80 columns; commands that take several jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import ROOT
from tests.command import Vjob
from tests.documents import get_commands
from tests.test_docs import list_commands
from tests.toys import build_environment, install_toy, settle
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
    commands = get_commands(cli)
    for title, rows in COMMANDS.items():
        assert f"\n{title}:\n" in text
        for row in rows:
            assert f"{row.name} {row.help}" in flat
            assert commands[row.name].get_short_help_str(1000) == row.help
            assert commands[row.name].name == row.name
    assert all("..." not in get_help(*words).partition("\n")[2] for words in [(), ("container",)])


@pytest.mark.parametrize("words", [["--help"], ["--version"], []], ids=str)
def test_the_help_imports_no_command_and_no_library_but_click(words: list[str]) -> None:
    code = (
        "import sys; from vjob.shelf.commands.cli import cli\n"
        f"try: cli.main({words!r}, prog_name='vjob')\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = set(done.stderr.split())
    ours = {name for name in found if name.startswith(("vjob.jobs.", "vjob.shelf."))}
    assert ours == {
        "vjob.jobs.errors",
        "vjob.shelf.commands",
        "vjob.shelf.commands.cli",
        "vjob.shelf.commands.terminal",
    }
    foreign = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names)
    assert not foreign & {"textual", "pandas", "jinja2", "yaml", "submitit", "numpy", "torch"}


TOY = """
import click

@click.command()
def toy():
    \"\"\"Play with a toy. Nothing else.\"\"\"
    click.echo("wheee")

toy.API = 1
"""


def test_a_command_of_a_plugin_is_listed_completed_and_run(tmp_path: Path) -> None:
    """Its own line of help is shown once it has been used; before, it is not imported for it."""
    folder = install_toy(tmp_path / "toys", "vjob.commands", "toy = toy_command:toy", TOY)
    settle(folder)
    env = {**build_environment(tmp_path, folder), "COMP_CWORD": "1"}
    env["COMP_WORDS"] = "vjob to"

    def vjob(*words: str, **variables: str) -> str:
        return subprocess.run(
            [sys.executable, ROOT / "vjob/__main__.py", *words],
            env={**env, **variables}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert "From plug-ins:\n  toy         A plug-in of toy-dist 1.0.\n" in vjob("--help")
    assert vjob("toy") == "wheee\n"
    assert "From plug-ins:\n  toy         Play with a toy.\n" in vjob("--help")
    assert vjob(_VJOB_COMPLETE="bash_complete").split() == ["plain,toy"]
    (folder / "toy_command.py").write_text("toy = 3\n")
    assert "Play with a toy." in vjob("--help")
    done = subprocess.run(
        [sys.executable, ROOT / "vjob/__main__.py", "toy"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("vjob: plug-in toy of toy-dist 1.0 is ignored: toy_command:toy")
    assert "No such command 'toy'" in done.stderr


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
        assert "give one or more JOBs, or --sweep NAME" in vjob("cancel", *words, code=2).stderr

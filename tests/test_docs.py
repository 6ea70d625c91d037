"""The documents are true: their confs parse, their links lead somewhere, their commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.conf_check import check_conf
from jobs.conf_read import parse_conf_lines

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page.name, text) for page in PAGES for text in pattern.findall(page.read_text())]


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_confs_in_the_documents_have_no_problems(page: str, text: str) -> None:
    """A fragment is only parsed: its other keys are not there to be checked against."""
    is_whole = text.startswith("name:")
    conf, lines = parse_conf_lines(text if is_whole else f"name: x\n{text}", page, ROOT, environ={})
    if is_whole:
        assert check_conf(conf, lines, base=ROOT, require_paths=False) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_in_the_documents_exist() -> None:
    text = "\n".join(block for _, block in blocks("sh"))
    for name in set(re.findall(r"^vjob (\w+)", text, re.MULTILINE)):
        assert name in cli.commands, name
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"^make (\w+)", text, re.MULTILINE)):
        assert f"\n{name}:" in makefile, name


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_help_teaches(command: str) -> None:
    done = CliRunner().invoke(cli, [command, "--help"] if command else ["--help"])
    assert done.exit_code == 0 and len(done.output.splitlines()) > 5


def test_completion_is_shell() -> None:
    done = CliRunner().invoke(cli, ["completion", "bash"])
    assert done.exit_code == 0 and "complete" in done.output

"""Readers of the documents: code blocks, links, anchors, `vjob` commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click

from tests import ROOT
from vjob.shelf.commands.cli import cli

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_OPERATORS = re.compile(r"[|&;<>()]+")


def find_blocks(language: str) -> list[tuple[str, str]]:
    """Find all code blocks of a language: the page and the text of each."""
    return [
        (page.name, text)
        for page in PAGES
        for _, found, text in _FENCE.findall(page.read_text())
        if found == language
    ]


def read_prose(page: Path) -> str:
    """Read a page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def find_links(page: Path) -> list[str]:
    """Find the targets of links and pictures that lie in this tree."""
    targets = re.findall(r"\]\(([^)]+)\)", read_prose(page))
    return [target for target in targets if "://" not in target and "mailto:" not in target]


def find_anchors(page: Path) -> set[str]:
    """Build the anchors of a page's headings, as GitHub and the site do."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", read_prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def get_commands(group: click.Group) -> dict[str, click.Command]:
    """Import the commands of a group, hidden ones too."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def find_commands(text: str) -> Iterator[list[str]]:
    """Split each `vjob` command of a shell text into words, also after `srun` and the like."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not _OPERATORS.fullmatch(word):
                words.append(word)
                continue
            if "vjob" in words:
                yield words[words.index("vjob") + 1 :]
            words = []


def parse_command(words: list[str]) -> None:
    """Parse a command line with the command's own parser; nothing runs, files need not exist."""
    context, command, rest = click.Context(cli, info_name="vjob"), cli, words
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found  # type: ignore[assignment]
    is_asking = isinstance(command, click.Group) or "--help" in rest  # would print and exit
    with mock.patch.object(click.Path, "convert", lambda _self, value, *_: value):
        command.make_context(command.name, list(rest), context, resilient_parsing=is_asking)


def find_wrong_commands(text: str) -> list[str]:
    """Find `vjob` commands in prose that do not parse; arguments may be left out there."""
    lies = []
    for span in re.findall(r"`(vjob [^`]+)`", " ".join(text.split())):
        for words in find_commands(span):
            try:
                parse_command(words)
            except (click.MissingParameter, click.BadOptionUsage):
                continue
            except click.UsageError as error:
                lies.append(f"{span}: {error.message}")
    return lies

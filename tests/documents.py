"""What the documents say, taken out of their text: code blocks, links, anchors, `vjob` commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click

from tests import ROOT
from vjob.jobs.commands.cli import cli

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_OPERATORS = re.compile(r"[|&;<>()]+")


def blocks(language: str) -> list[tuple[str, str]]:
    """Of all pages: the page and the text of a block."""
    return [
        (page.name, text)
        for page in PAGES
        for _, found, text in _FENCE.findall(page.read_text())
        if found == language
    ]


def read_prose(page: Path) -> str:
    """Without the code blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of links and pictures that lie in this tree."""
    targets = re.findall(r"\]\(([^)]+)\)", read_prose(page))
    return [target for target in targets if "://" not in target and "mailto:" not in target]


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", read_prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `vjob` command of a shell text, after `srun` and the like too."""
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
    """By the command's own parser, which runs nothing; files need not be there."""
    context, command, rest = click.Context(cli, info_name="vjob"), cli, words
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found  # type: ignore[assignment]
    is_asking = isinstance(command, click.Group) or "--help" in rest  # would print and exit
    with mock.patch.object(click.Path, "convert", lambda _self, value, *_: value):
        command.make_context(command.name, list(rest), context, resilient_parsing=is_asking)


def find_lies(text: str) -> list[str]:
    """`vjob` commands and options in a sentence that are none; arguments may be left out there."""
    lies = []
    for span in re.findall(r"`(vjob [^`]+)`", " ".join(text.split())):
        for words in commands(span):
            try:
                parse_command(words)
            except (click.MissingParameter, click.BadOptionUsage):
                continue
            except click.UsageError as error:
                lies.append(f"{span}: {error.message}")
    return lies

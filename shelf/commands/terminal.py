"""Output of commands: text broken between words where there is a terminal, as it is in a pipe.

Logs, scripts, confs and JSON are not text of ours: they are printed as they are, to be copied.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

import click

from varuna_core.records.files import as_whole
from varuna_core.records.formatting import wrap_text

LEAST_WIDTH = 20
WIDTH = "VJOB_WIDTH"
"""Of the terminal that the screen of `vjob status`, or `vjob --host`, shows the output on."""
DUMB = ("", "dumb", "unknown")


def find_width(stream: TextIO) -> int | None:
    """Columns of the terminal; None of a pipe, unless a vjob at its other end has said them."""
    if stream.isatty():
        return max(LEAST_WIDTH, shutil.get_terminal_size().columns)
    said = os.environ.get(WIDTH, "")
    number = as_whole(said)
    return None if number is None else max(LEAST_WIDTH, number)


def say(text: str, *, err: bool = False) -> None:
    """Print text of ours."""
    click.echo(wrap_text(text, find_width(sys.stderr if err else sys.stdout)), err=err)


def can_draw(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """True for a terminal that goes back to the begin of a line."""
    return stream.isatty() and environ.get("TERM", "dumb") not in DUMB


def has_colours(environ: Mapping[str, str]) -> bool:
    """False where the user wants none, or the terminal has none."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in DUMB


class StatusLine:
    """One line on standard error that is written again and again, without an escape code."""

    def __init__(self) -> None:
        self.is_shown = can_draw(sys.stderr, os.environ)
        self._length = 0

    def show(self, text: str) -> None:
        """In place of what stands there; cut at the width, or it would fill line after line."""
        if not self.is_shown:
            return
        width = (find_width(sys.stderr) or 80) - 1
        click.echo(f"\r{text[:width]:<{min(self._length, width)}}", err=True, nl=False)
        self._length = len(text[:width])

    def clear(self) -> None:
        if self._length:
            self.show("")
            click.echo("\r", err=True, nl=False)

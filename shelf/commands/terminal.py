"""Output of commands: text is wrapped between words on a terminal, and left unchanged in a pipe.

Logs, scripts, confs and JSON are never wrapped, so that they can be copied.
"""

from __future__ import annotations

import contextlib
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
"""Variable with the width of the terminal on which `vjob status` or `vjob --host` shows the
output."""
DUMB = ("", "dumb", "unknown")


def find_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal; for a pipe, the width that a vjob process at the other
    end of the pipe has set in the environment, or None."""
    if stream.isatty():
        return max(LEAST_WIDTH, shutil.get_terminal_size().columns)
    said = os.environ.get(WIDTH, "")
    number = as_whole(said)
    return None if number is None else max(LEAST_WIDTH, number)


def say(text: str, *, err: bool = False) -> None:
    """Print our own text, wrapped to the terminal's width.

    An error that stderr does not take, such as one of a full disk to which stderr is redirected, is
    lost: the exit code remains.
    """
    shown = wrap_text(text, find_width(sys.stderr if err else sys.stdout))
    with contextlib.suppress(*((OSError,) if err else ())):
        click.echo(shown, err=err)


def can_draw(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return True if the terminal can return to the beginning of a line."""
    return stream.isatty() and environ.get("TERM", "dumb") not in DUMB


def has_colours(environ: Mapping[str, str]) -> bool:
    """Return False if the user wants no colours, or if the terminal has none."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in DUMB


class StatusLine:
    """Line on standard error that is overwritten repeatedly, without escape codes."""

    def __init__(self) -> None:
        self.is_shown = can_draw(sys.stderr, os.environ)
        self._length = 0

    def show(self, text: str) -> None:
        """Replace the text of the status line. The text is cut at the terminal's width, because a
        wrapped line could not be overwritten by the next one."""
        if not self.is_shown:
            return
        width = (find_width(sys.stderr) or 80) - 1
        click.echo(f"\r{text[:width]:<{min(self._length, width)}}", err=True, nl=False)
        self._length = len(text[:width])

    def clear(self) -> None:
        if self._length:
            self.show("")
            click.echo("\r", err=True, nl=False)

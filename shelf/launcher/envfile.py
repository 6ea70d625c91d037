"""The environment file: shell assignments, all lines of it. Pure, and no value is ever shown.

# a comment
NCCL_DEBUG=INFO  NCCL_IB_DISABLE=1     # another
export HF_TOKEN='what a shell would take as it is'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vjob.jobs.errors import InputError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BLANK = " \t\r\n"


@dataclass
class _Word:
    """A shell word as it is read."""

    line: int
    text: str = ""
    active: str = ""
    """A character that a shell would act on, in place of taking it."""


def parse_env_file(text: str, name: str) -> dict[str, str]:
    """Names and values; `name` is the file's, for messages."""
    found: dict[str, str] = {}
    last: str | None = None
    for word in _split_words(text, name):
        where = f"{name}:{word.line}"
        if word.text == "export":
            continue
        key, equals, value = word.text.partition("=")
        if not equals or not _NAME.fullmatch(key):
            after = f" after {last}" if last else ""
            raise InputError(f"{where}: want NAME=VALUE{after}; quote a value with spaces in it")
        if "\0" in value:
            raise InputError(f"{where}: {key} holds a NUL character")
        if word.active:
            raise InputError(
                f"{where}: {key}: a shell would act on the {word.active} in it, and nothing does "
                "here: put the value in single quotes, or write out what it stands for"
            )
        found[key] = value
        last = key
    return found


def _split_words(text: str, name: str) -> Iterator[_Word]:
    """Words as a shell splits them, with their quotes taken off."""
    word: _Word | None = None
    quote, line, opened = "", 1, 1
    chars = iter(zip(text, [*text, ""][1:], strict=True))
    for char, follower in chars:
        line += char == "\n"
        if not quote and char in _BLANK:
            if word is not None:
                yield word
            word = None
            continue
        if word is None and char == "#":
            for char, _ in chars:
                if char == "\n":
                    line += 1
                    break
            continue
        word = word or _Word(line)
        if char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote, opened = char, line
        elif char == "\\" and quote != "'" and (not quote or follower in '$`"\\\n'):
            line += follower == "\n"
            word.text += follower if follower != "\n" else ""
            next(chars, None)
        else:
            if _is_active(char, follower, quote, word.text):
                word.active = word.active or char
            word.text += char
    if quote:
        raise InputError(f"{name}:{opened}: a quote is opened here and never closed")
    if word is not None:
        yield word


def _is_active(char: str, follower: str, quote: str, before: str) -> bool:
    """True if a shell would act on a character, between these quotes and after this text."""
    if quote == "'":
        return False
    if char == "$":
        opens = follower.isalnum() or (follower != "" and follower in "_{(@*#?!$-")
        return opens or (not quote and follower != "" and follower in "'\"")
    if char == "`":
        return True
    return not quote and (char in ";&|<>()" or (char == "~" and before.endswith(("=", ":"))))

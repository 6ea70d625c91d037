"""Hide the secrets of a conf wherever it is shown or stored: the value of a key, of `NAME=value` in
a shell line, of `--name value` in arguments. varuna_core/records/secrets.py recognizes them in
text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from varuna_core.records.secrets import (
    REDACTED,
    is_secret,
    is_secret_name,
    redact_arguments,
    redact_string,
    withhold,
)
from vjob.jobs.conf.yaml_tree import Items, Scalar, Table

_COMMENT = re.compile(r"#[^\n]*")
_IN_COMMENT = re.compile(r"(?<![A-Za-z0-9_-])([A-Za-z0-9_-]+)([ \t]*[:=][ \t]*)(\S.*)")
_SHOWN_CHARS = 60


def redact_value(value: Any, secret: bool = False) -> Any:
    """Return a conf's plain data (mappings, lists, scalars) without its secrets."""
    if isinstance(value, Mapping):
        return {
            key: redact_value(inner, secret or is_secret(str(key))) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        if not secret and all(isinstance(item, str) for item in value):
            return redact_arguments(value)
        flags = ["", *value][: len(value)]
        return [
            redact_value(item, secret or _is_secret_flag(flag))
            for flag, item in zip(flags, value, strict=True)
        ]
    if value is None or isinstance(value, bool):
        return value
    if secret:
        return REDACTED
    return redact_string(value) if isinstance(value, str) else value


def _is_secret_flag(text: object) -> bool:
    return isinstance(text, str) and text.startswith("-") and is_secret_name(text)


def show(key: str, value: object) -> str:
    """Format a value for a message: one short line without secrets or the content of mappings."""
    if isinstance(value, Table | Mapping):
        return "a mapping"
    if isinstance(value, Items):
        return "a list"
    if isinstance(value, list | tuple):
        text = f"[{', '.join(show(key, item) for item in value)}]"
    elif isinstance(value, Scalar):
        text = "null" if value.is_null else value.text or '""'
    else:
        text = "null" if value is None else str(value) or '""'
    parts = [_cut_index(part) for part in key.split(".")]
    if text not in ("null", '""') and any(map(is_secret, parts)):
        return REDACTED
    text = withhold(text)
    if not text.isprintable() or text != text.strip():
        text = repr(text)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _cut_index(part: str) -> str:
    """Return `keys` for `keys[0][1]`."""
    head = part.rstrip("[]0123456789")
    return head + part[len(head) :].partition("[")[0]


def redact_text(text: str) -> str:
    """Return a conf's text without its secrets, keeping layout and comments. It must be YAML."""
    parts, end = [], 0
    for start, stop, shown in sorted(_find_hidden(text)):
        parts += [_redact_comments(text[end:start]), shown]
        end = stop
    return "".join([*parts, _redact_comments(text[end:])])


def _redact_comments(text: str) -> str:
    def hide(match: re.Match[str]) -> str:
        return match[1] + match[2] + REDACTED if is_secret_name(match[1]) else match[0]

    return _COMMENT.sub(lambda comment: _IN_COMMENT.sub(hide, redact_string(comment[0])), text)


def _find_hidden(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and the text to show for each scalar that is hidden."""
    scalars: list[tuple[yaml.ScalarEvent, bool]] = []
    hidden_anchors: set[str | None] = set()
    stack: list[_Place] = [_Place(secret=False, is_table=False)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = stack[-1]
        if isinstance(event, yaml.ScalarEvent):
            scalars.append((event, place.accept(event.value)))
        elif isinstance(event, yaml.AliasEvent):
            if place.accept(""):
                hidden_anchors.add(event.anchor)
        elif isinstance(event, yaml.CollectionStartEvent):
            is_table = isinstance(event, yaml.MappingStartEvent)
            stack.append(_Place(secret=place.accept(""), is_table=is_table))
        elif isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
    for event, is_hidden in scalars:
        assert event.start_mark is not None and event.end_mark is not None
        start, stop = event.start_mark.index, event.end_mark.index
        shown = REDACTED if is_hidden or (event.anchor in hidden_anchors - {None}) else None
        if shown is None and redact_string(event.value) != event.value:
            shown = redact_string(event.value)
        if shown is None or not event.value:
            yield start, stop, text[start:stop]
            continue
        anchor = f"&{event.anchor} " if event.anchor is not None else ""
        line_end = "\n" if text[start:stop].endswith("\n") else ""  # of a block scalar
        yield start, stop, anchor + json.dumps(shown) + line_end


class _Place:
    """Position of the next scalar: a key, the value of a key, or the next item of a list."""

    def __init__(self, *, secret: bool, is_table: bool) -> None:
        self.secret, self.is_table = secret, is_table
        self.key: str | None = None
        self.before = ""

    def accept(self, text: str) -> bool:
        """Advance to the next position after a YAML node with this text; return True if the node is
        secret."""
        if not self.is_table:
            secret = self.secret or _is_secret_flag(self.before)
            self.before = text
            return secret
        if self.key is None:
            self.key = text
            return False
        secret = self.secret or is_secret(self.key)
        self.key = None
        return secret

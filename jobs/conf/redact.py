"""Secrets of a conf, recognized and hidden wherever it is shown or stored.

A secret is known by its name (`is_secret`): the value of such a key, of `NAME=value` in a shell
line, of `--name value` in arguments, and a password in a URL. A secret under a harmless name cannot
be known; `pass_env` keeps it out of the conf altogether.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from vjob.jobs.conf.yaml_tree import Items, Scalar, Table

SECRET_PARTS = ("token", "secret", "password", "passphrase", "credential", "webhook", "apikey")
SECRET_WORDS = frozenset(
    {"auth", "authorization", "cookie", "dsn", "key", "pass", "passwd", "pat", "pwd"}
)
REDACTED = "<redacted>"
_URL_PASSWORD = re.compile(r"://[^/@\s]+@")
_VALUE = r"(\"[^\"]*\"|'[^']*'|[^\s;&|\"']+)"
_ASSIGNED = re.compile(r"([A-Za-z_-][A-Za-z0-9_-]*)(=)" + _VALUE)
_FLAG = re.compile(r"(--?[A-Za-z][A-Za-z0-9_-]*)([ \t]+)" + _VALUE)
_HEADER = re.compile(r"([A-Za-z][A-Za-z-]*)(:[ \t]*)(Bearer[ \t]+|Basic[ \t]+)?([^\s\"']+)")
_COMMENT = re.compile(r"#[^\n]*")
_IN_COMMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)([ \t]*[:=][ \t]*)(\S.*)")
_LITERAL = re.compile(
    r"""([A-Za-z_][A-Za-z0-9_-]*)(["']?\]?[ \t]*(?:=|:|,)[ \t]*)[rbfu]{0,2}("[^"\n]*"|'[^'\n]*')"""
)
_KEY_BLOCK = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)(.*?)(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_KNOWN_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16})"
)
_SHOWN_CHARS = 60


def is_secret(key: str) -> bool:
    """True for a key whose value must not be shown: HF_TOKEN, WANDB_API_KEY, SLACK_WEBHOOK_URL."""
    word = key.lower().rpartition(".")[2].replace("tokenizer", "")  # TOKENIZERS_PARALLELISM
    word = word.removeprefix("pass_env")  # a key of ours, it holds names
    return any(part in word for part in SECRET_PARTS) or not SECRET_WORDS.isdisjoint(
        word.split("_")
    )


def is_secret_name(name: str) -> bool:
    """`is_secret` for variables, flags and headers: `--api-key`, `Authorization`."""
    return is_secret(name.lstrip("-").replace("-", "_"))


def redact_string(text: str) -> str:
    """A line of shell, an argument or a URL without its secrets."""

    def hide(match: re.Match[str]) -> str:
        return match[1] + match[2] + REDACTED if is_secret_name(match[1]) else match[0]

    text = _URL_PASSWORD.sub(f"://{REDACTED}@", text)
    for pattern in (_ASSIGNED, _FLAG, _HEADER):
        text = pattern.sub(hide, text)
    return text


def redact_code(text: str) -> str:
    """Source code, or a patch of it, without its secrets.

    Besides what `redact_string` knows: a literal beside a secret's name, as in `{"token": "x"}`,
    tokens of well-known shapes, and private keys.
    """

    def hide(match: re.Match[str]) -> str:
        return match[1] + match[2] + REDACTED if is_secret_name(match[1]) else match[0]

    text = _KEY_BLOCK.sub(rf"\1 {REDACTED} \3", text)
    text = _KNOWN_TOKEN.sub(REDACTED, text)
    return redact_string(_LITERAL.sub(hide, text))


def redact_value(value: Any, secret: bool = False) -> Any:
    """A conf's plain data (mappings, lists, scalars) without its secrets."""
    if isinstance(value, Mapping):
        return {
            key: redact_value(inner, secret or is_secret(str(key))) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
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
    """A value for a message: one short line, without secrets, never the inside of a mapping."""
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
    parts = [re.sub(r"(\[\d+\])+$", "", part) for part in key.split(".")]
    if text not in ("null", '""') and any(map(is_secret, parts)):
        return REDACTED
    text = redact_string(text)
    if not text.isprintable() or text != text.strip():
        text = repr(text)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def redact_text(text: str) -> str:
    """A conf's own text without its secrets; layout and comments stay. The text must be YAML."""
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
    """Start and end of each scalar, and its text as it may be shown."""
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
    """Position of the next scalar: a key, the value of one, or an item after another."""

    def __init__(self, *, secret: bool, is_table: bool) -> None:
        self.secret, self.is_table = secret, is_table
        self.key: str | None = None
        self.before = ""

    def accept(self, text: str) -> bool:
        """Take one node; True when it is secret."""
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

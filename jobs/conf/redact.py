"""Secrets of a conf, recognized and hidden wherever it is shown or stored.

A secret is known by its name (`is_secret`): the value of such a key, of `NAME=value` in a shell
line, of `--name value` in arguments. Or by its shape: tokens of well-known services, private keys,
passwords and signatures in URLs, what is piped into a login. One of no known shape under a harmless
name cannot be known; `pass_env` keeps it out of the conf altogether.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from vjob.jobs.conf.yaml_tree import Items, Scalar, Table

SECRET_PARTS = (
    "token", "secret", "password", "passphrase", "credential", "webhook", "apikey",
    "api_key", "access_key", "private_key",
)  # fmt: skip
SECRET_WORDS = frozenset(
    {"auth", "authorization", "cookie", "dsn", "key", "pass", "passwd", "pat", "pwd"}
)
REDACTED = "<redacted>"
_URL_PASSWORD = re.compile(r"://[^/@\s]+@")
_VALUE = r"(\"[^\"]*\"|'[^']*'|[^\s;&|\"']+)"
# A name is looked for where a word begins, and nowhere within it: text of one long word is passed
# once, not once for each of its letters.
_NAME = r"(?<![A-Za-z0-9_-])([A-Za-z0-9_-]+)"
_ASSIGNED = re.compile(_NAME + r"(=)" + _VALUE)
_FLAG = re.compile(r"(?<![A-Za-z0-9_-])(--?[A-Za-z][A-Za-z0-9_-]*)([ \t]+)" + _VALUE)
_HEADER = re.compile(_NAME + r"(:[ \t]*)(Bearer[ \t]+|Basic[ \t]+)?([^\s\"']+)")
_COMMENT = re.compile(r"#[^\n]*")
_IN_COMMENT = re.compile(_NAME + r"([ \t]*[:=][ \t]*)(\S.*)")
_LITERAL = re.compile(
    _NAME + r"""(["']?\]?[ \t]*(?:=|:|,)[ \t]*)[rbfu]{0,2}("[^"\n]*"|'[^'\n]*')"""
)
_KEY_BLOCK = re.compile(
    r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(.*?)(-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_TOKENS = (
    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{20,}",  # GitHub
    r"github_pat_\w{20,}",
    r"gl(?:pat|dt|rt|cbt|ptt)-[\w-]{16,}",  # GitLab
    r"sk-[\w-]{20,}",  # OpenAI, Anthropic
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"xox[abeprs]-[\w-]{10,}",  # Slack
    r"xapp-[\w-]{10,}",
    r"A(?:KI|SI)A[A-Z0-9]{16}",  # AWS
    r"AIza[\w-]{35}",  # Google
    r"ya29\.[\w-]{20,}",
    r"GOCSPX-[\w-]{20,}",
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[\w-]{30,}",
    r"dckr_pat_[\w-]{20,}",  # Docker
    r"do[opr]_v1_[a-f0-9]{40,}",  # DigitalOcean
    r"dapi[a-f0-9]{32}",  # Databricks
    r"nvapi-[\w-]{20,}",  # NVIDIA
    r"hvs\.[\w-]{20,}",  # Vault
    r"SG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
    r"r8_[A-Za-z0-9]{30,}",  # Replicate
    r"\d{8,10}:AA[\w-]{30,}",  # Telegram
    r"AGE-SECRET-KEY-1[A-Z0-9]{50,}",
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?",  # JSON web tokens
)
_KNOWN_TOKEN = re.compile(rf"(?<![A-Za-z0-9_-])(?:{'|'.join(_TOKENS)})")
_CHAT_HOOK = re.compile(
    r"(https://(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks"
    r"|[\w.-]{1,100}\.webhook\.office\.com/webhookb2|chat\.googleapis\.com/v1/spaces"
    r"|open\.feishu\.cn/open-apis/bot|oapi\.dingtalk\.com/robot)/)([^\s\"']+)"
)
_SIGNATURE = re.compile(
    r"(?<![A-Za-z0-9_-])((?:sig|AccountKey|SharedAccessSignature|X-Amz-Signature|X-Amz-Credential"
    r"|X-Goog-Signature)=)([^\s;&\"']+)"
)
_PIPED = re.compile(
    r"(?<![A-Za-z0-9_-])((?:echo|printf)[ \t]+(?:-n[ \t]+)?)"
    + _VALUE
    + r"(?=[^\n;&|]{0,200}\|[^\n;&|]{0,200}(?:login|--password-stdin|passwd))"
)
_PASSWORD_FLAG = re.compile(
    r"(?<![A-Za-z0-9_-])((?:sshpass|login|mysql|mysqldump)"
    r"(?:[ \t]+[^\s|;&]{1,100}){0,6}?[ \t]+-p[ \t]*)" + _VALUE
)
_USER_FLAG = re.compile(r"((?:^|[ \t])(?:-u|--user)[ \t=]+[\"']?[^\s:\"'/]{1,100}:)([^\s\"'/]+)")
_LOGIN = re.compile(
    r"(?<![A-Za-z0-9_-])(wandb[ \t]+login[ \t]+(?:-\S+[ \t]+)?)([A-Za-z0-9_-]{32,})"
)
_SHAPES = (_CHAT_HOOK, _SIGNATURE, _PIPED, _PASSWORD_FLAG, _USER_FLAG, _LOGIN)
"""What goes before the secret, then the secret itself."""

_SHOWN_CHARS = 60
LEAST_SECRET = 6
"""Shorter words are found in any text."""
_PLAIN = re.compile(
    r"[-+.\d]+(?:e[-+]?\d+)?|true|false|none|null|yes|no|(?:\.{0,2}|~)/.*|[$%].*", re.IGNORECASE
)
"""Numbers, switches, paths and references: no secrets themselves."""


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

    text = _KEY_BLOCK.sub(rf"\1 {REDACTED} \3", text)
    text = _KNOWN_TOKEN.sub(REDACTED, text)
    text = _URL_PASSWORD.sub(f"://{REDACTED}@", text)
    for pattern in _SHAPES:
        text = pattern.sub(rf"\1{REDACTED}", text)
    for pattern in (_ASSIGNED, _FLAG, _HEADER):
        text = pattern.sub(hide, text)
    return text


def redact_code(text: str) -> str:
    """Source code, or a patch of it, without its secrets.

    Besides what `redact_string` knows: a literal beside a secret's name, as in `{"token": "x"}`.
    """

    def hide(match: re.Match[str]) -> str:
        return match[1] + match[2] + REDACTED if is_secret_name(match[1]) else match[0]

    return redact_string(_LITERAL.sub(hide, text))


def find_secrets(text: str, *, in_output: bool = False) -> Iterator[str]:
    """The secrets that stand in a text, by shape or beside a secret's name.

    In what a program printed (`in_output`) many a name is harmless, `key: layer_3` or `tokens=big`:
    there a value counts that looks drawn by chance.
    """
    for value in _find_shapes(text):
        if not _is_plain(value):
            yield value
    for pattern, group in ((_ASSIGNED, 3), (_FLAG, 3), (_HEADER, 4), (_LITERAL, 3)):
        for match in pattern.finditer(text):
            value = match[group].strip("\"'")
            if in_output and match[1].lower() == "key":  # of a mapping, a node's seat, a weight
                continue
            if is_secret_name(match[1]) and _may_be_secret(value, is_drawn=in_output):
                yield value


def _find_shapes(text: str) -> Iterator[str]:
    for match in _KEY_BLOCK.finditer(text):
        yield match[2].strip()
    for match in _KNOWN_TOKEN.finditer(text):
        yield match[0]
    for match in _URL_PASSWORD.finditer(text):
        user, colon, password = match[0][3:-1].partition(":")
        yield password if colon else user
    for pattern in _SHAPES:
        for match in pattern.finditer(text):
            yield match[2].strip("\"'")


def _is_plain(value: str) -> bool:
    return not value or "redacted" in value or _PLAIN.fullmatch(value) is not None


def is_value_secret(name: str, value: str) -> bool:
    """True for a variable whose value no other text may hold: by its name, or where it looks drawn
    by chance."""
    return _may_be_secret(value, is_drawn=not is_secret_name(name))


def _may_be_secret(value: str, *, is_drawn: bool) -> bool:
    if _is_plain(value):
        return False
    if not is_drawn:
        return len(value) >= LEAST_SECRET
    classes = (r"[a-z]", r"[A-Z]", r"\d")
    return (
        re.fullmatch(r"[\w+/=-]{16,}", value) is not None
        and sum(re.search(one, value) is not None for one in classes) >= 2
        and len(re.findall(r"\d", value)) >= 3
    )


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
    parts = [_cut_index(part) for part in key.split(".")]
    if text not in ("null", '""') and any(map(is_secret, parts)):
        return REDACTED
    text = redact_string(text)
    if not text.isprintable() or text != text.strip():
        text = repr(text)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _cut_index(part: str) -> str:
    """`keys` of `keys[0][1]`."""
    head = part.rstrip("[]0123456789")
    return head + part[len(head) :].partition("[")[0]


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

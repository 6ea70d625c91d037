"""Find secrets in text by name, by shape, or because they look random.

`redact_string` and `redact_code` redact secrets that a name or a shape reveals. `withhold` also
redacts each word of high entropy, unless `HARMLESS` has a reason to show it; it is for text that
other users read. `find_secrets` and `find_drawn` return the same words. A short secret under a
harmless name cannot be detected; `pass_env` keeps it out of the conf altogether.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Collection, Iterator, List, Match, Sequence, Set, Tuple

REDACTED = "<redacted>"
LEAST_SECRET = 6
"""Minimum length of a secret: shorter words occur in any text."""

# Names.

SECRET_PARTS = (
    "token", "secret", "password", "passphrase", "passwd", "passcode", "credential", "webhook",
    "apikey", "accesskey", "privatekey", "authkey", "signingkey", "accountkey", "masterkey",
    "netrc", "pgpass", "connectionstring", "connstr",
)  # fmt: skip
"""Parts of a name that mark a secret. The words of the name are joined first: `api_key` and
`apiKey` become `apikey`."""
SECRET_WORDS = frozenset(
    [
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "cred",
        "creds",
        "dsn",
        "jwt",
        "key",
        "oauth",
        "pass",
        "passw",
        "pat",
        "psk",
        "pw",
        "pwd",
        "sas",
        "totp",
    ]
)
SECRET_ENDS = ("pw", "pwd", "creds", "dbpass", "bindpass", "userpass", "mypass", "ldappass")
_TEXT_TOKENS = frozenset(
    [
        "max",
        "min",
        "num",
        "n",
        "no",
        "total",
        "train",
        "eval",
        "valid",
        "test",
        "seen",
        "per",
        "new",
        "add",
        "special",
        "prompt",
        "completion",
        "warmup",
        "batch",
        "processed",
        "consumed",
        "skip",
        "pad",
        "eos",
        "bos",
        "unk",
        "sep",
        "cls",
        "mask",
        "image",
        "video",
        "audio",
        "start",
        "end",
        "stop",
        "visual",
        "begin",
        "of",
        "by",
        "global",
        "context",
        "decoder",
        "encoder",
        "target",
        "source",
        "input",
        "output",
        "first",
        "last",
        "next",
        "local",
        "text",
        "word",
        "class",
        "latent",
        "noise",
        "learnable",
        "register",
        "query",
        "think",
        "tool",
    ]
)
"""Words before `token` that make it mean a piece of text: `pad_token`, `max_new_tokens`."""
_COUNTED = frozenset(
    [
        "count",
        "counts",
        "len",
        "length",
        "limit",
        "dim",
        "type",
        "embedding",
        "embeddings",
        "mask",
        "idx",
        "index",
        "level",
        "size",
        "budget",
        "ids",
        "ratio",
        "rate",
        "loss",
        "dropout",
        "shift",
        "mixing",
        "merging",
        "length",
        "usage",
        "throughput",
    ]
)
"""Words after `token` that make it mean a piece of text."""
_PLAIN_KEYS = frozenset(
    [
        "sort",
        "text",
        "image",
        "label",
        "caption",
        "prompt",
        "json",
        "field",
        "primary",
        "foreign",
        "dict",
        "data",
        "input",
        "output",
        "target",
        "group",
        "partition",
        "index",
        "lookup",
        "column",
        "row",
        "map",
        "cache",
        "video",
        "audio",
        "message",
        "content",
        "batch",
        "sample",
        "state",
        "metric",
        "monitor",
        "loss",
        "config",
        "param",
        "num",
        "query",
        "answer",
        "response",
        "question",
        "forward",
        "backward",
        "first",
        "second",
        "multi",
        "single",
        "low",
        "high",
        "by",
        "two",
        "one",
        "per",
        "each",
    ]
)
"""Words before `key` or `pass` that make it mean the key of a mapping, or a pass over something."""


def is_secret(key: str) -> bool:
    """Return True for a key whose value must not be shown: HF_TOKEN, WANDB_API_KEY, ldapBindPw."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.rpartition(".")[2]).lower()
    text = text.replace("-", "_").replace("tokenizer", "")  # TOKENIZERS_PARALLELISM
    if text.startswith("pass_env"):  # a key of ours, it holds names
        text = text[len("pass_env") :]
    words = text.split("_")
    kept = [
        word
        for before, word, after in zip(  # noqa: B905 - Python 3.8
            ["", *words], words, [*words[1:], ""]
        )
        if not (word in ("token", "tokens") and (before in _TEXT_TOKENS or after in _COUNTED))
        and not (word in ("key", "pass") and before in _PLAIN_KEYS)
    ]
    joined = "".join(kept)
    return (
        any(part in joined for part in SECRET_PARTS)
        or not SECRET_WORDS.isdisjoint(kept)
        or joined.endswith(SECRET_ENDS)
    )


def is_secret_name(name: str) -> bool:
    """Apply `is_secret` to names of variables, flags and headers: `--api-key`, `Authorization`."""
    return is_secret(name.lstrip("-"))


# Shapes.

_VALUE = r"(\"[^\"]*\"|'[^']*'|[^\s;&|\"']+)"
# A name is looked for where a word begins, and nowhere within it: text of one long word is passed
# once, not once for each of its letters.
_EDGE = r"(?<![A-Za-z0-9_-])"
_NAME = _EDGE + r"([A-Za-z0-9_-]+)"
_SCHEME = (
    r"((?:Bearer|Basic|Token|Digest|Negotiate|ApiKey|Api-Key|Key|Bot|SSWS|GenieKey|GoogleLogin)"
    r"[ \t]+)?"
)
_ASSIGNED = re.compile(_NAME + r"()(=)" + _VALUE)
_FLAG = re.compile(_EDGE + r"(--?[A-Za-z][A-Za-z0-9_-]*)()([ \t]+)(?!--)" + _VALUE)
_HEADER = re.compile(_NAME + r"(:[ \t]*)" + _SCHEME + r"([^\s\"']+)")
_SPACED = re.compile(_NAME + r"()([ \t]{1,8}[=:][ \t]{0,8}|[ \t]{0,8}=[ \t]{1,8})" + _VALUE)
_LITERAL = re.compile(
    _NAME + r"""()(["']?\]?[ \t]*(?:=|:|,)[ \t]*)[rbfu]{0,2}("[^"\n]*"|'[^'\n]*')"""
)
_KEY_BLOCK = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)(.*?)"
    r"(-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_TOKENS = (
    r"(?:hf|api_org)_[A-Za-z0-9]{16,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{20,}",  # GitHub
    r"github_pat_\w{20,}",
    r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|oas|ffct)-[\w.-]{16,}",  # GitLab
    r"sk-[\w-]{20,}",  # OpenAI, Anthropic, OpenRouter, Langfuse
    r"(?:sk|rk|pk|whsec)_(?:live_|test_|prod_|ant_)?[A-Za-z0-9]{16,}",  # Stripe, Clerk
    r"xox[abceoprs]-[\w-]{10,}",  # Slack
    r"x(?:app|oxe\.xox[bp])-[\w-]{10,}",
    r"A(?:KI|SI|BI|CC)A[A-Z0-9]{16}",  # AWS
    r"ABSK[A-Za-z0-9+/]{40,}",
    r"AIza[\w-]{35}",  # Google
    r"ya29\.[\w-]{20,}",
    r"1//0[\w-]{20,}",
    r"GOCSPX-[\w-]{20,}",
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[\w-]{30,}",
    r"rubygems_[a-f0-9]{40,}",
    r"dckr_(?:pat|oat)_[\w-]{20,}",  # Docker
    r"do[opr]_v1_[a-f0-9]{40,}",  # DigitalOcean
    r"dapi[a-f0-9]{32}",  # Databricks
    r"dkea[a-f0-9]{32}",
    r"nvapi-[\w-]{20,}",  # NVIDIA
    r"hv[sbr]\.[\w-]{20,}",  # Vault
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,}",  # Terraform
    r"SG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
    r"r8_[A-Za-z0-9]{30,}",  # Replicate
    r"\d{8,10}:AA[\w-]{30,}",  # Telegram
    r"AGE-SECRET-KEY-1[A-Z0-9]{50,}",
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?",  # JSON web tokens
    r"eyJhcGlf[\w+/=-]{16,}",  # Neptune
    r"wandb_v\d_\w{20,}",
    r"(?:gsk|xai|pplx|fw|csk|tgp_v1|pcsk|rpa|tvly|esecret)[_-][A-Za-z0-9_-]{20,}",  # Groq and more
    r"lsv2_(?:pt|sk)_[\w-]{20,}",  # LangSmith
    r"gl(?:sa|c|ev)_[\w+/=-]{16,}",  # Grafana
    r"shp(?:at|ss|ca|pa|ua)_[A-Fa-f0-9]{16,}",  # Shopify
    r"AT(?:ATT3|CTT3|BB)[\w=-]{16,}",  # Atlassian
    r"sntry[sua]_[\w+/=-]{16,}",  # Sentry
    r"tskey-[\w-]{16,}",  # Tailscale
    r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{20,}",  # Doppler
    r"(?:FlyV1 )?fm[12][ar]?_[\w+/=-]{20,}",  # Fly
    r"(?:AKCp|cmVmdGtu)[A-Za-z0-9]{40,}",  # Artifactory
    r"[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{30,36}",  # Azure AD
)
_VENDORS = (  # noqa: SIM905
    "jina voyage pa e2b fc lf nk ollama vck bb_live deepinfra novita cw lambda secret hyp"
    " re ops rnd bkua CCIPAT pul figd figu lin_api ntn PMAK sbp sb_secret pscale_tkn pscale_pw"
    " pscale_oauth phc phx tfp dt0c01 dt0s01 NRAK NRII NRJS shippo_live duffel_live sq0atp sq0csp"
    " EAAA EAAC tk-us pat-na1 pat-eu1 ddp ddapp key mg sl pnu pnb modal as ak oy2 cio LTAI AKID SCW"
    " zpka ctx7sk crsr bws vercel nfp HRKU cfut cfat v1.0"
).split()
"""Prefixes of vendors' keys, if a random word follows; otherwise they are ordinary words."""
_BLOB = re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{2000,}")
"""Data in base64, a picture or a script: in a megabyte of it every short shape stands somewhere."""
_KNOWN_TOKEN = re.compile(rf"(?<![A-Za-z0-9_.-])(?:{'|'.join(_TOKENS)})")
_LIKELY_TOKEN = re.compile(
    rf"(?<![A-Za-z0-9_.-])(?:{'|'.join(map(re.escape, _VENDORS))})[._-]?[A-Za-z0-9_+/=-]{{16,}}"
)
_URL_LOGIN = re.compile(
    r"://(?![^/@\s:\"'<>]{0,200}:\d{1,5}/)([^/\s\"'<>]{0,500})(/[^\s\"'<>?#]{0,100})?@"
)
_CHAT_HOOK = re.compile(
    r"(https://(?:hooks\.slack\.com/(?:services|workflows|triggers)"
    r"|discord(?:app)?\.com/api/webhooks|[\w.-]{1,100}\.webhook\.office\.com/webhookb2"
    r"|outlook\.office\.com/webhook|chat\.googleapis\.com/v1/spaces|open\.(?:feishu|larksuite)\.c"
    r"(?:n|om)/open-apis/bot|oapi\.dingtalk\.com/robot|hooks\.zapier\.com/hooks|hc-ping\.com"
    r"|maker\.ifttt\.com/trigger|ntfy\.sh|webhook\.site|api\.telegram\.org"
    r"|events\.pagerduty\.com/integration|hook\.[\w.]{2,20}make\.com"
    r"|qyapi\.weixin\.qq\.com/cgi-bin/webhook)/)([^\s\"']+)"
)
_SIGNATURE = re.compile(
    _EDGE + r"((?:sig|AccountKey|SharedAccessKey|SharedAccessSignature|X-Amz-Signature"
    r"|X-Amz-Credential|X-Amz-Security-Token|X-Goog-Signature|Signature|GoogleAccessId"
    r"|Key-Pair-Id|OSSAccessKeyId|Policy|q-signature)=)([^\s;&\"']+)"
)
_TAKES_SECRET = (
    r"(?:login|--password-stdin|passwd|kinit|sudo[ \t]+-S|--passphrase-fd|cryptsetup|openssl"
    r"|chpasswd|ssh-add|sshpass|gh[ \t]+auth|vault|ldapsearch|-pass[ \t]+stdin|htpasswd|keyctl)"
)
_PIPED = re.compile(
    _EDGE
    + r"((?:echo|printf)[ \t]+(?:-n[ \t]+|-e[ \t]+|[\"']?%s(?:\\n)?[\"']?[ \t]+)?)"
    + _VALUE
    + rf"(?=[^\n;&|]{{0,200}}\|[^\n;&|]{{0,200}}{_TAKES_SECRET})"
)
_HERE_STRING = re.compile(rf"({_TAKES_SECRET}[^\n<]{{0,200}}<<<[ \t]*)" + _VALUE)
_HERE_DOCUMENT = re.compile(
    rf"({_TAKES_SECRET}[^\n<]{{0,200}}<<-?[ \t]*[\"']?\w{{1,40}}[\"']?[^\n]{{0,200}}\n[ \t+]*)(\S+)"
)
_PASSWORD_FLAG = re.compile(
    _EDGE + r"((?:sshpass|login|mysql|mysqldump|ldapsearch|ldapwhoami|redis-cli|smbclient|7z|unzip)"
    r"(?:[ \t]+[^\s|;&]{1,100}){0,6}?[ \t]+-(?:p|w|a|P)[ \t]*)" + _VALUE
)
_USER_FLAG = re.compile(
    r"((?:^|[ \t])(?:-u|--user|--proxy-user|-U)[ \t=]+[\"']{0,6}[^\s:\"'/]{0,100}[:%])"
    r"(?!&#?\w{2,4};)([^\s\"'/]+)"
)
_KEY_AS_USER = re.compile(
    r"((?:^|[ \t])(?:-u|--user)[ \t=]+[\"']{0,6})([^\s:\"'/]{8,200})(?=:(?:[\"'\s]|$))"
)
_LOGIN = re.compile(
    _EDGE + r"((?:wandb|comet|neptune|clearml|swanlab|huggingface-cli)[ \t]+login[ \t]+"
    r"(?:-\S+[ \t]+)*)([A-Za-z0-9_-]{20,})"
)
_NETRC = re.compile(
    _EDGE + r"((?:machine[ \t]+\S{1,200}|default)\s{1,8}login\s{1,8}\S{1,200}\s{1,8}"
    r"(?:account\s{1,8}\S{1,200}\s{1,8})?password\s{1,8})(\S+)"
)
_PGPASS = re.compile(r"(?m)(^[+ ]?[\w.*-]{1,100}:(?:\d{2,5}|\*):[\w*-]{1,60}:[\w*-]{1,60}:)(\S+)$")
_KEY_SAID = re.compile(
    r"((?:using|with|API|api)[ \t]{1,8}key[ \t]{0,8}[:=]?[ \t]{0,8}[\"']?)([A-Za-z0-9_-]{20,})"
)
_SQL = re.compile(
    r"((?:IDENTIFIED BY|(?:WITH|ENCRYPTED) PASSWORD)[ \t]+)('[^'\n]*')", re.IGNORECASE
)
_SHAPES = (
    _CHAT_HOOK, _SIGNATURE, _PIPED, _HERE_STRING, _HERE_DOCUMENT, _PASSWORD_FLAG, _USER_FLAG,
    _KEY_AS_USER, _LOGIN, _NETRC, _PGPASS, _KEY_SAID, _SQL,
)  # fmt: skip
"""Patterns with two groups: the words before a secret, and the secret itself."""

_PLAIN = re.compile(
    r"[-+.\d]+(?:e[-+]?\d+)?|true|false|none|null|yes|no|(?:\.{0,2}|~)/.*|[$%].*|[{(\[<].*",
    re.IGNORECASE,
)
"""Numbers, switches, paths and references, which are not secrets."""
_REFERENCE = re.compile(r"\$\(?[{A-Za-z_].*|%\(.*|true|false|none|null", re.IGNORECASE)
_EXPRESSION = re.compile(
    r"[A-Za-z_]\w*(?:[.(\[,)\]:}].*)?|[{(\[<\\*].*|[-+]?[\d.]+[,)\]}]*", re.DOTALL
)
"""An expression that yields a value in a program: a name, a call, a bracket, a number."""


def redact_string(text: str) -> str:
    """Redact the secrets in a line of shell, an argument or a URL."""
    return _hide_named(_hide_shapes(text), is_code=False)


def redact_code(text: str) -> str:
    """Redact the secrets in source code or in a patch.

    In addition to the secrets that `redact_string` finds, redact a literal beside a secret's name,
    as in `{"token": "x"}`.
    """
    return _hide_named(_hide_shapes(_LITERAL.sub(_hide_literal, text)), is_code=True)


def redact_arguments(words: Sequence[str]) -> List[str]:
    """Redact the words of a command line, including secrets that only two words together reveal."""
    found = {value for value in find_secrets(" ".join(words)) if len(value) >= LEAST_SECRET}
    shown = []
    for before, word in zip(["", *words], words):  # noqa: B905 - Python 3.8
        names_it = is_secret_name(before) and before.startswith("-") and not word.startswith("--")
        if names_it or (before.lower() in _SAID and not _is_plain(word)):
            shown.append(REDACTED)
            continue
        word = redact_string(word)
        for value in sorted(found, key=len, reverse=True):
            word = word.replace(value, REDACTED)
        shown.append(word)
    return shown


_SAID = frozenset(
    ["password", "passwd", "passphrase", "secret", "token", "pw", "apikey", "api_key"]
)
"""Words that announce that the next word is a secret: `set password x`."""


def withhold(text: str, known_folders: Collection[str] = ()) -> str:
    """Redact text for other users: both secrets and words that may be secrets."""
    text = redact_code(text)
    for word in sorted(set(find_drawn(text, known_folders)), key=len, reverse=True):
        text = text.replace(word, REDACTED)
    return text


def _hide_shapes(text: str) -> str:
    text = _KEY_BLOCK.sub(rf"\1 {REDACTED} \3", text)
    text = _KNOWN_TOKEN.sub(REDACTED, text)
    text = _LIKELY_TOKEN.sub(lambda match: REDACTED if is_drawn(match[0]) else match[0], text)
    text = _URL_LOGIN.sub(lambda match: f"://{REDACTED}@" if _is_login(match) else match[0], text)
    for pattern in _SHAPES:
        text = pattern.sub(
            lambda match: match[0] if _is_reference(match[2]) else match[1] + REDACTED, text
        )
    return text


def _is_login(match: Match[str]) -> bool:
    """Return False for a path with an `@` in it: `https://host/@scope/name`."""
    return not match[2] or ":" in match[1]


def _is_reference(value: str) -> bool:
    return _REFERENCE.fullmatch(value.strip("\"'")) is not None


def _hide_named(text: str, *, is_code: bool) -> str:
    def hide(match: Match[str]) -> str:
        name, before, scheme, value = match.groups(default="")
        if not is_secret_name(name) or _is_reference(value):
            return match[0]
        if is_code and not scheme.strip(" \t=") and _is_expression(name, value):
            return match[0]
        return name + before + (scheme if scheme.strip(" \t") in ("", "=") else "") + REDACTED

    for pattern in (_ASSIGNED, _FLAG, _HEADER):
        text = pattern.sub(hide, text)

    def hide_spaced(match: Match[str]) -> str:
        value = match[4].strip("\"'")
        is_drawn = is_secret_name(match[1]) and _may_be_secret(value, is_drawn=True)
        is_meant = is_drawn or _is_password(match[1], value, is_code=is_code)
        return match[1] + match[3] + REDACTED if is_meant else match[0]

    return _SPACED.sub(hide_spaced, text)


def _is_password(name: str, value: str, *, is_code: bool) -> bool:
    """Return True for `password = hunter2` and `db_pw = 493817`, as files of settings have them.

    In code a word without a digit may be a variable, so it does not count there.
    """
    return (
        _PASSWORD_NAME.fullmatch(name) is not None
        and len(value) >= LEAST_SECRET
        and not _is_reference(value)
        and re.match(r"[A-Za-z_]\w*[.(\[]|[{(\[<]", value) is None
        and (not is_code or re.search(r"\d", value) is not None)
    )


_PASSWORD_NAME = re.compile(r"(?i)(?:.{0,60}[_.-])?(?:pass(?:word|wd|phrase)|pw|pwd)")


def _hide_literal(match: Match[str]) -> str:
    value = match[4][1:-1]
    if not is_secret_name(match[1]) or not value or _is_reference(value):
        return match[0]
    if match[1] == "key" and value.isalpha():
        return match[0]  # of a mapping: key="loss"
    return match[1] + match[3] + REDACTED


def _is_expression(name: str, value: str) -> bool:
    """Return True for a program's `token=self.token` and `key: str`, not a script's `TOKEN=x`."""
    if name.isupper() or value[:1] in "\"'" or is_drawn(value):
        return False
    if _EXPRESSION.fullmatch(value) is None:
        return False
    return not value.isalnum() or value in _TYPES or is_secret_name(value) or len(value) < 3


_TYPES = frozenset(
    [
        "str",
        "int",
        "bool",
        "float",
        "bytes",
        "dict",
        "list",
        "tuple",
        "set",
        "object",
        "Any",
        "None",
        "True",
        "False",
        "Tensor",
        "Path",
    ]
)


def find_secrets(text: str, *, in_output: bool = False) -> Iterator[str]:
    """Return the secrets in a text, by shape or beside a secret's name.

    In a program's output (`in_output`) many names are harmless, such as `key: layer_3` or
    `tokens=big`, so a value counts only if it looks random.
    """
    for value in _find_shapes(text):
        if not _is_plain(value):
            yield value
    for pattern in (_ASSIGNED, _FLAG, _HEADER, _SPACED, _LITERAL):
        for match in pattern.finditer(text):
            value = match[4].strip("\"'")
            if in_output and match[1].lower() == "key":  # of a mapping, a node's seat, a weight
                continue
            is_meant = not in_output and _is_password(match[1], value, is_code=True)
            must_be_drawn = in_output or pattern is _SPACED
            if is_secret_name(match[1]):
                is_meant = is_meant or _may_be_secret(value, is_drawn=must_be_drawn)
            if is_meant:
                yield value


def _find_shapes(text: str) -> Iterator[str]:
    for match in _KEY_BLOCK.finditer(text):
        yield match[2].strip()
    text = _BLOB.sub(" ", text)
    for match in _KNOWN_TOKEN.finditer(text):
        yield match[0]
    for match in _LIKELY_TOKEN.finditer(text):
        if is_drawn(match[0]):
            yield match[0]
    for match in _URL_LOGIN.finditer(text):
        if _is_login(match):
            user, colon, password = match[0][3:-1].partition(":")
            yield password if colon and password else user
    for pattern in _SHAPES:
        for match in pattern.finditer(text):
            yield match[2].strip("\"'")


def _is_plain(value: str) -> bool:
    return not value or "redacted" in value or _PLAIN.fullmatch(value) is not None


def is_value_secret(name: str, value: str) -> bool:
    """Return True for a variable whose value must not appear in other text: its name marks a
    secret, or its value looks random."""
    return _may_be_secret(value, is_drawn=not is_secret_name(name))


def _may_be_secret(value: str, *, is_drawn: bool) -> bool:
    if _is_plain(value):
        return False
    if not is_drawn:
        return len(value) >= LEAST_SECRET
    classes = (r"[a-z]", r"[A-Z]", r"\d")
    return (
        re.fullmatch(r"[\w+/=~.-]{10,}", value) is not None
        and sum(re.search(one, value) is not None for one in classes) >= 2
        and len(re.findall(r"\d", value)) >= (3 if len(value) < 24 else 1)
        and _surprise_of(value) >= 0
    )


# Words drawn by chance.

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = (
    "44444456576555648434466488", "854487585a634395a34366776a", "35563687458357369446498958",
    "385737835b4477269463589b6b", "46652668288577469546477979", "474355687a845375633486657a",
    "465533792ab47737a454498a6c", "467727544aa46456c345578988", "276627873d766737b554598969",
    "5545565a8a844245a54495a6c5", "385727a8475787268648388a7a", "46562466398475558535675c79",
    "377527883a847736b755589b49", "257628883a865733c856599b6b", "48433538496676469743668a8a",
    "654486596a644254c354464699", "386636864e8388349354587a5c", "666677887985866745471879bb",
    "375527693b665636b444667a5b", "584727743a657744774248796a", "375626843a866746a345587958",
    "545645695c934364c34389a8aa", "2768177837a76757b667888999", "276636842a857446a4468877b9",
    "454533764c9667639652767558", "55564577498443528533766866", "3767178739b76847b757777867",
)  # fmt: skip
"""Bits of information of each letter at the beginning of a word, after an a, after a b and so on,
counted over 43,000 words of programs: this one and Python's library."""
_LETTER_BITS = {
    before + letter: int(bits, 16)
    for before, row in zip("^" + _LETTERS, _PAIRS)  # noqa: B905
    for letter, bits in zip(_LETTERS, row)  # noqa: B905
}
_KIND_BITS = {
    "^l": 0.9, "^u": 1.6, "^d": 3.0, "ll": 0.1, "lu": 5.1, "ld": 4.7, "ul": 1.7, "uu": 0.6,
    "ud": 5.5, "dl": 2.0, "du": 5.5, "dd": 0.5,
}  # fmt: skip
"""Bits of information in the kind of a character (l lower case, u capital, d digit), keyed by the
kind of the character before (`^` at the beginning of a word) and its own."""
_DIGIT_BITS = 3.3
_SIZES = {"l": 26, "u": 26, "d": 10}
LEAST_SURPRISE = 8.0
"""Minimum number of bits by which a random origin is likelier than a written one: 99 of 100 random
words of 16 letters and digits are above it, and 1 in 10,000 words of programs, apart from commit
hashes."""
LEAST_DRAWN = 12
"""Minimum length of a word that is tested for randomness."""
LEAST_RUN = 6
"""Minimum length of a run of letters within a longer word: shorter runs, as in `MLP_FC2`, prove
nothing."""
_WORD = re.compile(r"[A-Za-z0-9+/=_.~%-]{12,}")
_RUN = re.compile(r"[A-Za-z0-9]+")
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")

HARMLESS = (
    (r"sha(?:1|224|256|384|512)[:=-][A-Za-z0-9+/=]{16,}", "digest of an image, file or package"),
    (r"(?:md5|blake2b|crc32)[:=-][A-Za-z0-9+/=]{8,}", "digest of a file"),
    (r"index [0-9a-f]{7,64}\.\.[0-9a-f]{7,64}", "blobs of a patch"),
    (
        r"(?:commit|revision|rev|tree|parent|sha|hash|md5|checksum|digest|etag|base|head|ref|branch"
        r"|version|snapshots?|blob|raw|archive|resolve|checkout|pull|merge|Merge|From|cherry-pick)"
        r"[\w\"']{0,20}[ \t]{0,4}[:=/@]?[ \t]{0,4}[\"']?[0-9a-f]{7,64}(?![A-Za-z0-9])",
        "hash of a commit, or a digest, according to its name",
    ),
    (r"(?:git\+|github\.com|gitlab\.com|huggingface\.co)[^\s\"']{1,300}", "public address"),
    (r"@[0-9a-f]{40}(?![A-Za-z0-9])", "commit hash of a package or an action"),
    (
        r"(?:GPU-|MIG-)?[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
        "UUID, such as a GPU's; a secret one has a name that says so",
    ),
    (r"data:[\w/+.-]{1,60};base64,[A-Za-z0-9+/=]+", "picture in a page"),
    (r"(?:ssh-(?:rsa|ed25519)|ecdsa-sha2-\w{1,20}) [A-Za-z0-9+/=]{40,}", "public key"),
    (
        r"-----BEGIN (?:CERTIFICATE|PUBLIC KEY|PGP PUBLIC KEY BLOCK|SSH SIGNATURE)-----"
        r"[A-Za-z0-9+/=\s\\]{1,20000}-----END",
        "certificate or public key",
    ),
    (r"(?:[A-Za-z]:)?[\w.~@%+-]{0,100}(?:/[\w.~@%+-]{1,100}){1,40}\.[a-z][a-z0-9]{0,9}(?![\w/+=])",
     "path of a file"),
)  # fmt: skip
"""Words of high entropy that may be shown, each with the reason."""
_HARMLESS = re.compile("|".join(rf"(?:{pattern})" for pattern, _ in HARMLESS))
FOLDERS = (
    (r"(?<![\w.-])((?:/var/tmp|/tmp|/dev/shm)/)([\w.~@%+=-]{1,100})", "everybody can list these"),
    (r"(/)(tmp[a-z0-9_]{8}|tmp\.[A-Za-z0-9]{10})(?![\w.~%+=-])", "folder of tempfile or mktemp"),
    (r"(?<![\w.-])(/nix/store/)([0-9a-z]{32}-[\w.+-]{1,100})", "package of Nix"),
    (r"(/)([a-z][\w.+-]{0,60}-\d[\w.]{0,30}-[a-z2-7]{32})(?![\w.~%+=-])", "package of Spack"),
)
"""Texts before names of folders that look random but may be shown."""
_FOLDERS = [re.compile(pattern) for pattern, _ in FOLDERS]


def find_drawn(text: str, known_folders: Collection[str] = ()) -> Iterator[str]:
    """Return the words that look random, and base64 of text that contains a secret.

    `known_folders` are names that may be shown as parts of a path.
    """
    for folder in _FOLDERS:
        text = folder.sub(lambda match: match[1] + " " * len(match[2]), text)
    for name in known_folders:
        text = re.sub(rf"(?<=/){re.escape(name)}(?![\w.~%+=-])", " " * len(name), text)
    harmless = [match.span() for match in _HARMLESS.finditer(text)]
    at = 0
    for match in _WORD.finditer(text):
        while at < len(harmless) and harmless[at][1] <= match.start():
            at += 1
        for start, stop in _list_parts(match):
            if at < len(harmless) and _covers(harmless, at, start, stop):
                continue
            part = text[start:stop]
            if is_drawn(part) or _holds_secret(part):
                yield part


def _covers(spans: List[Tuple[int, int]], first: int, start: int, stop: int) -> bool:
    for begin, end in spans[first : first + 8]:
        if begin <= start and stop <= end:
            return True
        if begin > start:
            return False
    return False


def _list_parts(match: Match[str]) -> Iterator[Tuple[int, int]]:
    """Return a word, or the parts of an assignment, of a path or of a dotted name."""
    text, start = match[0], match.start()
    value = text.rstrip("=").rpartition("=")
    if value[1]:  # NAME=value, with the blanks of base64 at its end
        start += len(value[0]) + 1
        text = match[0][len(value[0]) + 1 :]
    if is_drawn(text):
        yield start, start + len(text)
        return
    at = 0
    for part in re.split(r"[/.~%]", text):
        if len(part) >= LEAST_DRAWN:
            yield start + at, start + at + len(part)
        at += len(part) + 1


def is_drawn(word: str) -> bool:
    """Return True for a word that is likelier random than written by a person."""
    return len(word) >= LEAST_DRAWN and _surprise_of(word) >= LEAST_SURPRISE


def _surprise_of(word: str) -> float:
    """Return the bits by which the word is likelier random than written, over all its runs of
    letters."""
    bits = 0.0
    for run in _RUN.findall(word):
        bits += _measure(run) if len(run) >= LEAST_RUN else min(0.0, _measure(run))
    return bits


def _measure(run: str) -> float:
    kinds: Set[str] = set()
    bits, kind_before, before = 0.0, "^", "^"
    for sign in run:
        kind = "d" if sign.isdecimal() else "l" if sign.islower() else "u"
        kinds.add(kind)
        bits += _KIND_BITS[kind_before + kind]
        letter = sign.lower()
        bits += _DIGIT_BITS if kind == "d" else _LETTER_BITS[before + letter]
        kind_before, before = kind, "^" if kind == "d" else letter
    if kinds == {"d"}:
        return -float(len(run))
    size = 16 if _HEX.fullmatch(run) else sum(_SIZES[kind] for kind in kinds)
    return bits - len(run) * math.log2(size)


def _holds_secret(word: str) -> bool:
    """Return True for base64 of text that contains a secret by name or shape."""
    if len(word) < 16:
        return False
    try:
        text = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_").decode("ascii")
    except (binascii.Error, ValueError):
        return False
    return text.isprintable() and next(find_secrets(text), None) is not None

"""Fill references to keys of the conf in a program's arguments and environment: `${train.steps}`.

References stay in the conf and in its resolved copy, and are filled when a plan or scripts are
built, since numbers that were `auto` are known then. `$${` stands for `${` itself; any other `$` is
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from varuna_core.records.plan import LAYOUT_KEYS, NODE_KEYS, mark_layout
from varuna_core.records.secrets import is_secret
from vjob.jobs.conf.parse import OTHER_WORDS, find_close, list_conf_keys
from vjob.jobs.conf.schema import OWN, JobConf
from vjob.jobs.conf.slurm_words import WORDS
from vjob.jobs.conf.world_size import get_replicas, require_number
from vjob.jobs.conf.yaml_tree import join_key
from vjob.jobs.errors import KeyProblem

REFERENCE = re.compile(r"\$\$\{|\$\{([^}]{0,200})\}|\$\{")
STEP = re.compile(r"([^.\[\]]+)|\[(\d{1,6})\]")
_KEY = re.compile(r"[^.\[\]\s]+(\[\d{1,6}\]|\.[^.\[\]\s]+)*")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*(:?[-=?+].*)?")
_COUNT = re.compile(r"cluster\.nodes\[\d+\]\.count")
_KEPT_LITERAL = re.compile(
    r"program\.(args|command)(\[\d+\])?|env\..*|cluster\.nodes\[\d+\]\.env\..*"
    r"|setup(\[\d+\])?|progress|notify\.command",
    re.DOTALL,
)
LITERAL = "for a literal ${ write $${"
OF_COMMAND = ("program.args", "program.command")
"""Keys whose words are arguments of a process."""


def is_kept_literal(key: str) -> bool:
    """Return True for a text whose `$` are kept when a conf is read, to fill later or never."""
    return _KEPT_LITERAL.fullmatch(key) is not None


def list_texts(conf: JobConf) -> Iterator[tuple[str, str]]:
    """Yield the texts that may hold references, by key."""
    for name, words in (("command", conf.program.command), ("args", conf.program.args)):
        for index, text in enumerate(words):
            yield f"program.{name}[{index}]", text
    for name, text in conf.env.items():
        yield f"env.{name}", text
    for index, group in enumerate(conf.cluster.nodes):
        for name, text in group.env.items():
            yield f"cluster.nodes[{index}].env.{name}", text


def list_referenced(conf: JobConf) -> frozenset[str]:
    """Return the keys that the conf refers to, such as `model.layers`."""
    return frozenset(
        match[1].strip()
        for _, text in list_texts(conf)
        for match in REFERENCE.finditer(text)
        if match[1] is not None
    )


def has_references(text: str) -> bool:
    return REFERENCE.search(text) is not None


def list_problems(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield references that cannot be filled: to unknown keys, or to keys without a value."""
    for place, text in list_texts(conf):
        for match in REFERENCE.finditer(text):
            if match[0] == "$${":
                continue
            message = "is not closed by }; " + LITERAL if match[1] is None else ""
            message = message or _find_problem(conf, match[1].strip(), place)
            if message:
                yield place, text, f"{match[0]} {message}"


def _find_problem(conf: JobConf, key: str, place: str) -> str:
    """Return why a reference cannot be filled; empty if it can."""
    if key in NODE_KEYS:
        return ""
    if not _KEY.fullmatch(key):
        shell = _VARIABLE.fullmatch(key) is not None
        return f"is not a conf key; {_explain_shell(key) if shell else LITERAL}"
    try:
        value = find_value(conf, key)
    except LookupError:
        return f"is not a conf key; {suggest_reference(key)}"
    if is_dataclass(value) or isinstance(value, Mapping):
        names = list(vars(value)) if is_dataclass(value) else list(value)
        inner = f", such as ${{{join_key(key, str(names[0]))}}}" if names else ""
        return f"is a section: name a key in it{inner}"
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"is a list of groups: name one, ${{{key}[0].count}}"
    if may_change_layout(conf) and _COUNT.fullmatch(key):
        return "may change during this run (morph): read VJOB_NUM_NODES in the script"
    if value is None and key not in _DERIVED:
        return f"has no value: set {key}"
    if place.startswith(OF_COMMAND) and is_secret(key):
        return "is a secret, but process lists show arguments: pass it by env or pass_env"
    if key.startswith(OF_COMMAND) or (isinstance(value, str) and has_references(value)):
        return "has references in it, which are not followed: use them here directly"
    return ""


def suggest_reference(key: str) -> str:
    """Suggest a key for a reference to an unknown name."""
    if _VARIABLE.fullmatch(key):
        return _explain_shell(key)
    parent, _, last = key.rpartition(".")
    word = WORDS.get(last.replace("_", "-"))
    other = OTHER_WORDS.get(last, "") if word is None else word.key
    same = [known for known in list_conf_keys() if known.rpartition(".")[2] == last]
    if other and (not parent or parent.startswith("cluster")):
        same = [other] if parent else [*same, other]
    inside = [known for known in list_conf_keys() if known.rpartition(".")[0] == parent]
    if same and (same == [other] or not (parent and inside)):
        shown = " or ".join(f"${{{known.replace('[]', '[0]')}}}" for known in dict.fromkeys(same))
        return f"did you mean {shown}? {LITERAL}"
    pool = {known.rpartition(".")[2]: known for known in (parent and inside) or list_conf_keys()}
    close = find_close(last, pool)
    said = "docs/conf.md lists them" if close is None else f'did you mean "{pool[close]}"?'
    return f"{said}; {LITERAL}"


def _explain_shell(key: str) -> str:
    name = re.split(r"[:=?+-]", key)[0]
    return (
        f"to pass a variable of your shell, write pass_env: [{name}] and read it in the "
        f"program's environment; {LITERAL}"
    )


def fill_references(conf: JobConf) -> JobConf:
    """Return the conf with references filled; its layout must be known and its texts checked.

    Keys that change with the nodes of a morphing run get a mark, which each attempt fills. Call
    this only once: `$${` becomes `${`, which a second call would take for a reference.
    """
    later = LAYOUT_KEYS if may_change_layout(conf) else ()

    def fill_one(match: re.Match[str]) -> str:
        key = (match[1] or "").strip()
        return mark_layout(key) if key in later or key in NODE_KEYS else _fill(conf, match)

    def fill(text: str) -> str:
        return REFERENCE.sub(fill_one, text)

    def fill_all(env: Mapping[str, str]) -> dict[str, str]:
        return {name: fill(text) for name, text in env.items()}

    nodes = tuple(replace(group, env=fill_all(group.env)) for group in conf.cluster.nodes)
    return replace(
        conf,
        program=replace(
            conf.program,
            command=tuple(map(fill, conf.program.command)),
            args=tuple(map(fill, conf.program.args)),
        ),
        env=fill_all(conf.env),
        cluster=replace(conf.cluster, nodes=nodes),
    )


def may_change_layout(conf: JobConf) -> bool:
    """Return True for a user's program whose layout follows the available nodes."""
    return conf.morph.enabled and conf.program.kind in OWN


def _fill(conf: JobConf, match: re.Match[str]) -> str:
    key = match[1]
    return "${" if key is None else spell_value(find_value(conf, key.strip(), is_closed=True))


def spell_value(value: Any) -> str:
    """Spell a value as an argument: lists with commas, true and false, null as nothing."""
    if isinstance(value, tuple):
        return ",".join(map(spell_value, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


_DERIVED: Mapping[str, Callable[[JobConf], Any]] = {
    "parallel.data": lambda conf: get_replicas(conf),
    "train.schedule.decay_steps": lambda conf: conf.train.steps,
    "train.global_batch_size": lambda conf: (
        require_number(conf.train.micro_batch_size)
        * ((get_replicas(conf) or 1) // conf.parallel.context)
        * require_number(conf.parallel.pipeline)
    ),
}
"""Functions that compute the value of a key whose default is derived from other keys."""


def find_value(conf: JobConf, key: str, *, is_closed: bool = False) -> Any:
    """Return the value of a dotted key; None if its section is missing, LookupError if unknown.

    With `is_closed` (the layout is known), derived defaults are computed.
    """
    value: Any = conf
    for name, index in STEP.findall(key):
        if index:
            if not isinstance(value, tuple):
                raise LookupError(key)
            value = value[int(index)]
        elif isinstance(value, Mapping):
            value = value[name]
        elif is_dataclass(value) and name in vars(value):
            value = getattr(value, name)
        elif value is None and key in list_conf_keys():
            return None
        else:
            raise LookupError(key)
    if is_closed and value in (None, "auto") and key in _DERIVED:
        return _DERIVED[key](conf)
    return value

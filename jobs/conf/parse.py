"""Parse a tree of YAML nodes into the types of the schema, noting every problem.

The dataclasses determine the parsing; only `program` and `model` have special spellings. The type
of a field decides what a scalar is, never YAML's guess: `12:30`, `0-11-8` and `no` are text in a
text field, `1e-5` is a number in a number field, and environment values stay the written text.
"""

from __future__ import annotations

import math
import re
import shlex
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from varuna_core.facts.partition import Partition
from varuna_core.plugins import list_plugins
from vjob.jobs.conf.quantities import Unit, explain_refusal, parse_quantity
from vjob.jobs.conf.redact import show
from vjob.jobs.conf.schema import (
    BUILT_IN,
    FUNCTION,
    MODELS,
    OWN,
    Bound,
    JobConf,
    Model,
    NodeGroup,
    PluginOf,
    Program,
    ProgramKind,
)
from vjob.jobs.conf.slurm_words import answer_word
from vjob.jobs.conf.yaml_tree import Items, Node, Scalar, Table, TableEntry, join_key
from vjob.jobs.errors import Problem

FAILED: Final = object()
"""Marks a value whose problem was noted, since None is a value."""
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
_INDEX = re.compile(r"\[\d+\]")
_ORDER = {bool: 1, int: 2, float: 3, Partition: 4, str: 4}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Partition: "layers per stage such as 0-11-8-8-8-8-5-0",
}
# Keys beside the one that names a program's file; `config` is DeepSpeed's.
OWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": ("config",),
    "script": ("launch", "arguments"),
    **{kind: ("launch",) for kind in OWN if kind != "script"},
}
PROGRAM_KEYS: Mapping[str, tuple[str, ...]] = {
    kind: (*OWN_KEYS.get(kind, ()), "args", "python", "snapshot")
    for kind in get_args(ProgramKind)
    if kind not in (*BUILT_IN, FUNCTION)
}
MODEL_ALLOWED = f"must be one of {', '.join(MODELS)}, or a mapping with layers, hidden and heads"
PROGRAM_ALLOWED = (
    f"{' or '.join(BUILT_IN)}, or a mapping: {{script: train.py}}, {{module: pkg.train}}, "
    "{command: [...]}, {megatron: checkout} or {deepspeed: train.py, config: ds.json}"
)
FUNCTION_REFUSED = "a function is submitted from Python: docs/python.md"
# What people write who think of other programs; Slurm's words have a table of their own.
OTHER_WORDS: Mapping[str, str] = {
    "walltime": "cluster.walltime_min",
    "time_limit": "cluster.walltime_min",
    "memory": "cluster.nodes[].memory_gb",
    "nproc_per_node": "cluster.nodes[].ranks",
    "num_nodes": "cluster.nodes[].count",
    "nnodes": "cluster.nodes[].count",
    "name": "cluster.nodes[].group",
    "iterations": "train.steps",
    "train_iters": "train.steps",
    "batch_size": "train.global_batch_size",
    "master_port": "cluster.port",
}


def get_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_optional(hint: Any) -> bool:
    return types.NoneType in get_members(hint)


def find_plugin_group(hint: Any) -> str:
    """Return the group of plug-ins whose names are values of a type; empty for other types."""
    marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return next((mark.group for mark in marks if isinstance(mark, PluginOf)), "")


def is_scalar(hint: Any) -> bool:
    if find_plugin_group(hint):
        return True
    return hint in _WORDS or hint is Any or get_origin(hint) is Literal


def describe(hint: Any, *, one_of: str = "one of ") -> str:
    """Describe a type, such as `a whole number or auto`, with its bounds; `one_of` precedes a list
    of words."""
    members = [member for member in get_members(hint) if member is not types.NoneType]
    if len(members) > 1 or (is_optional(hint) and not is_dataclass(members[0])):
        words = [describe(member, one_of=one_of) for member in members]
        return " or ".join([*words, "null"] if is_optional(hint) else words)
    bounds = find_bounds(members[0])
    limits = " and ".join(f"{bound.relation} {bound.spell()}" for bound in bounds)
    if [bound.relation for bound in bounds] == [">=", "<="]:
        limits = " to ".join(bound.spell() for bound in bounds)
    unit = find_unit(members[0])
    word = f"{unit.name}," if unit else _describe_member(strip_bounds(members[0]), one_of)
    return f"{word} {limits}".rstrip()


def strip_bounds(hint: Any) -> Any:
    is_bounded = get_origin(hint) is Annotated and not find_plugin_group(hint)
    return hint.__origin__ if is_bounded else hint


def _describe_member(member: Any, one_of: str) -> str:
    if find_plugin_group(member):
        return "the name of a plug-in"
    origin, args = get_origin(member), tuple(map(strip_bounds, get_args(member)))
    if origin is Literal:
        return (one_of if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        each = {int: "whole numbers", float: "numbers", str: "text"}.get(args[0], "mappings")
        return f"a list of {'' if args[-1] is ... else f'{len(args)} '}{each}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of names to {'numbers' if args[1] is float else 'values'}"
    return "a mapping" if is_dataclass(member) else _WORDS.get(member, "a value")


def parse_scalar(node: Scalar, hint: Any) -> Any:
    """Parse one scalar; FAILED if it does not fit the type."""
    members = [member for member in get_members(hint) if is_scalar(member)]
    if node.is_null and is_optional(hint):
        return None
    for member in sorted(members, key=lambda member: _ORDER.get(member, 0)):
        value = _parse_member(node, member)
        if value is not FAILED:
            return value
    return FAILED


def _parse_member(node: Scalar, hint: Any) -> Any:
    if hint is Any:
        return _guess(node)
    group = find_plugin_group(hint)
    if group:
        return node.text if node.text in list_plugins(group) else FAILED
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == node.text), FAILED)
    if hint is str:
        return FAILED if node.is_null else node.text
    if hint is Partition:
        return Partition.find(node.text) or FAILED
    if not node.plain:
        return FAILED
    if hint is bool:
        known = node.text in (node.text.lower(), node.text.title(), node.text.upper())
        return _BOOLS.get(node.text.lower(), FAILED) if known else FAILED
    if hint is int:
        return int(node.text.replace("_", "")) if _INT.fullmatch(node.text) else FAILED
    if hint is float and _FLOAT.fullmatch(node.text):
        number = float(node.text.replace("_", ""))
        return number if math.isfinite(number) else FAILED
    return FAILED


def _guess(node: Scalar) -> Any:
    """Parse a value of any type: null, a boolean, a whole number, else its exact text."""
    if node.is_null:
        return None
    for hint in (bool, int, str):
        value = _parse_member(node, hint)
        if value is not FAILED:
            return value
    return FAILED


def find_text_problem(text: str) -> str:
    """Return why no program can be given this text; empty if it can."""
    if "\0" in text:
        return "must not contain a NUL character"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "must not contain half of a surrogate pair"
    return ""


REMOVED: Mapping[str, tuple[str, str]] = {
    "train.checkpoint.memory_every": (
        "0",
        "vjob keeps no copies in memory; lower train.checkpoint.every instead",
    ),
    "profile.traces": (
        "null",
        "the report does not read files of torch.profiler; open them in HTA or ui.perfetto.dev; "
        "for a timeline in the report set profile.timeline: true",
    ),
}
"""Keys that no longer exist: for each, the value that is still accepted because it has no effect
(confs of old runs have it), and the message for any other value."""


def _asks_nothing(key: str, node: Node) -> bool:
    return isinstance(node, Scalar) and key in REMOVED and node.text == REMOVED[key][0]


def suggest(word: str, words: Iterable[str], *, what: str = "keys") -> str:
    """Return `did you mean "x"?`, or a list of the known words."""
    known = list(words)
    close = find_close(word, known)
    return f'did you mean "{close}"?' if close else f"valid {what}: {', '.join(known)}"


def find_close(word: str, words: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the known word that is most like the given word; None if no known word is similar."""
    import difflib  # only on the way to an error

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)


def suggest_close(parent: str, name: str, names: Iterable[str]) -> str:
    """Suggest keys of the same section, then all keys of this name.

    Keys of other sections are named but not proposed, since one name may have several meanings.
    """
    known = list(names)
    other = OTHER_WORDS.get(name.lower().replace("-", "_"), "")
    if other and (not parent or _INDEX.sub("[]", parent) == other.rpartition(".")[0]):
        return f'did you mean "{other if not parent else other.rpartition(".")[2]}"?'
    if not find_close(name, known, cutoff=0.85):
        same = [f'"{key}"' for key in list_conf_keys() if key.rpartition(".")[2] == name]
        if same and not parent:
            return f"did you mean {' or '.join(same)}?"
        inside = [key for key in same if key.startswith(f'"{_INDEX.sub("[]", parent)}.')]
        if inside:
            return f"did you mean {' or '.join(inside)}?"
        if same:
            return f"elsewhere there is {' and '.join(same)}"
    return suggest(name, known)


def kind_of(node: Node) -> str:
    return {Scalar: "a value", Items: "a list", Table: "a mapping"}[type(node)]


@cache
def get_hints(cls: type) -> dict[str, Any]:
    """Return names and types of a section's fields; annotations are kept only for plug-ins."""
    whole = get_annotations(cls)
    with_plugins = {
        name: hint for name, hint in whole.items() if any(map(find_plugin_group, get_members(hint)))
    }
    return {**get_type_hints(cls), **with_plugins}


@cache
def get_annotations(cls: type) -> dict[str, Any]:
    """Return `get_hints` with the bounds of numbers."""
    return get_type_hints(cls, include_extras=True)


def find_bounds(hint: Any) -> tuple[Bound, ...]:
    """Return the bounds of a number, or of each number in a list or mapping."""
    for member in get_members(hint):
        origin = get_origin(member)
        if origin is Annotated:
            return tuple(one for one in member.__metadata__ if isinstance(one, Bound))
        if origin is tuple or origin is Mapping:
            return find_bounds(get_args(member)[origin is Mapping])
    return ()


def find_unit(hint: Any) -> Unit | None:
    """Return the unit of a time or size; None for other types."""
    metadata = (getattr(member, "__metadata__", ()) for member in get_members(hint))
    return next((one for found in metadata for one in found if isinstance(one, Unit)), None)


def get_section_class(hint: Any) -> type | None:
    """Return the dataclass that a field holds, alone, optional or in a list."""
    for member in get_members(hint):
        inner = get_args(member)[0] if get_origin(member) is tuple else member
        if is_dataclass(inner) and isinstance(inner, type):
            return inner
    return None


@cache
def list_conf_keys(cls: type = JobConf, parent: str = "") -> tuple[str, ...]:
    """Return every dotted key of a conf."""
    keys: list[str] = []
    for name, hint in get_hints(cls).items():
        key = join_key(parent, name)
        keys.append(key)
        inner = get_section_class(hint)
        if inner is not None and inner is not Program:
            keys.extend(list_conf_keys(inner, key + ("[]" if inner is NodeGroup else "")))
    return tuple(keys)


def spell_groups(node: Node) -> Node:
    """Convert `cluster.nodes` to a list of groups if it is a number or a single group."""
    if isinstance(node, Scalar) and node.plain and _INT.fullmatch(node.text):
        node = Table(entries={"count": TableEntry(node=node, where=node.where)}, where=node.where)
    return Items(items=(node,), where=node.where) if isinstance(node, Table) else node


class ConfReader:
    """Parses a conf, given as a YAML tree; `lines` maps written keys to places in the file."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.lines: dict[str, str] = {}

    def note(self, where: str, key: str, value: object, message: str) -> None:
        shown = "" if value is MISSING else show(key, value)
        self.problems.append(Problem(where=where, key=key, value=shown, message=message))

    def read(self, node: Node) -> Any:
        """Read the whole conf; FAILED if a problem was noted."""
        self.lines[""] = node.where
        if isinstance(node, Scalar) and node.is_null:
            node = Table(entries={}, where=node.where)
        if not isinstance(node, Table):
            self.note(node.where, "", MISSING, f"a conf is a mapping of keys, not {kind_of(node)}")
            return FAILED
        return self.read_record(node, JobConf, "")

    def read_value(self, node: Node, hint: Any, key: str) -> Any:
        self.lines.setdefault(key, node.where)
        node = spell_groups(node) if key == "cluster.nodes" else node
        is_null = isinstance(node, Scalar) and node.is_null
        if is_null and is_optional(hint):
            return None
        for member in get_members(hint):
            if member is Program or member is Model or (is_null and not is_scalar(member)):
                return self.read_member(node, member, key)
        if isinstance(node, Scalar):
            return self.read_scalar(node, hint, key)
        for member in get_members(hint):
            origin = get_origin(member)
            is_list = origin is tuple or member is Any
            is_table = is_dataclass(member) or origin is Mapping or member is Any
            if (is_list and isinstance(node, Items)) or (is_table and isinstance(node, Table)):
                return self.read_member(node, member, key)
        return self.refuse(node, key, f"must be {describe(hint)}")

    def read_scalar(self, node: Scalar, hint: Any, key: str) -> Any:
        problem = find_text_problem(node.text)
        if problem:
            return self.refuse(node, key, problem)
        value = parse_scalar(node, hint)
        if value is not FAILED:
            return value
        message = f"must be {describe(hint)}"
        unquoted = Scalar(text=node.text, plain=True, where=node.where)
        if not node.plain and parse_scalar(unquoted, hint) is not FAILED:
            message += ", without quotes"
        if node.is_null and hint is str:
            message += '; write "" for an empty one'
        return self.refuse(node, key, message)

    def read_quantity(self, node: Scalar, hint: Any, key: str, unit: Unit) -> Any:
        """Read a whole number, with or without units: 90, `1h30m`, `1:30:00`; 64, `64G`."""
        if node.is_null or (node.plain and _INT.fullmatch(node.text)):
            return self.read_value(node, hint, key)
        if node.text.strip().isdecimal():
            return self.read_scalar(node, hint, key)  # in quotes: refused as all numbers are
        value = parse_quantity(node.text, unit)
        if value is None or value.denominator != 1:
            return self.refuse(node, key, explain_refusal(node.text, unit))
        return int(value)

    def read_member(self, node: Node, hint: Any, key: str) -> Any:
        """Read a node as a type that is not a plain scalar; null stands for an empty value."""
        if hint is Program:
            return self.read_program(node, key)
        if hint is Model:
            return self.read_model(node, key)
        empty = isinstance(node, Scalar)
        origin = get_origin(hint)
        if is_dataclass(hint) and isinstance(hint, type):
            table = Table(entries={}, where=node.where) if empty else node
            return self.read_record(table, hint, key)
        if origin is tuple:
            return self.read_list(
                () if not isinstance(node, Items) else node.items, hint, key, node
            )
        if hint is Any:
            return self.refuse(node, key, "must be a single value")
        return self.read_mapping({} if not isinstance(node, Table) else node, hint, key)

    def read_record(self, node: Node, cls: type, key: str) -> Any:
        assert isinstance(node, Table)
        hints, annotations = get_hints(cls), get_annotations(cls)
        values = {}
        for name, entry in node.entries.items():
            if name in hints:
                self.lines[join_key(key, name)] = entry.where
                unit = find_unit(annotations[name])
                if unit is not None and isinstance(entry.node, Scalar):
                    values[name] = self.read_quantity(
                        entry.node, hints[name], join_key(key, name), unit
                    )
                    continue
                values[name] = self.read_value(entry.node, hints[name], join_key(key, name))
            elif not _asks_nothing(join_key(key, name), entry.node):
                message = "unknown key; " + self.suggest_key(key, name, entry.node, hints)
                self.note(entry.where, join_key(key, name), entry.node, message)
        for field in fields(cls):
            required = field.default is MISSING and field.default_factory is MISSING
            if required and field.name not in node.entries:
                allowed = describe(hints[field.name])
                if field.name == "program":
                    allowed = PROGRAM_ALLOWED
                where = self.lines.get(key, node.where)
                self.note(where, join_key(key, field.name), MISSING, f"is required: {allowed}")
                values[field.name] = FAILED
        return FAILED if FAILED in values.values() else cls(**values)

    def suggest_key(self, parent: str, name: str, node: Node, hints: Mapping[str, Any]) -> str:
        """Suggest what may be meant by an unknown key: the key for a removed key or for a Slurm
        option, or else a key with a similar name or with the same name in another section."""
        if join_key(parent, name) in REMOVED:
            return REMOVED[join_key(parent, name)][1]
        text = node.text if isinstance(node, Scalar) else None
        is_shown = show(join_key(parent, name), node) == text
        answer = answer_word(parent, name, text if is_shown else None, is_set=node.where == "--set")
        if answer and (isinstance(node, Scalar) or f"cluster.{name}" not in list_conf_keys()):
            return answer
        return suggest_close(parent, name, hints)

    def read_list(self, nodes: tuple[Node, ...], hint: Any, key: str, node: Node) -> Any:
        args = get_args(hint)
        if args[-1] is not ... and len(nodes) != len(args):
            return self.refuse(node, key, f"must be {describe(hint)}")
        values = []
        for index, item in enumerate(nodes):
            name = f"{key}[{index}]"
            self.lines[name] = item.where
            values.append(self.read_value(item, args[0], name))
        return FAILED if FAILED in values else tuple(values)

    def read_mapping(self, node: Table | Mapping[str, Any], hint: Any, key: str) -> Any:
        values = {}
        for name, entry in node.entries.items() if isinstance(node, Table) else ():
            inner = join_key(key, name)
            self.lines[inner] = entry.where
            problem = find_text_problem(name)
            if problem:
                self.note(entry.where, key, name, f"a name {problem}")
            values[name] = self.read_value(entry.node, get_args(hint)[1], inner)
        return FAILED if FAILED in values.values() else values

    def read_program(self, node: Node, key: str) -> Any:
        """Read a built-in name, or a mapping in which one key gives the kind of program."""
        if isinstance(node, Scalar) and node.text in BUILT_IN:
            return Program(kind=node.text)  # type: ignore[arg-type]  # one of BUILT_IN
        if not isinstance(node, Table):
            message = f"must be {PROGRAM_ALLOWED}"
            if isinstance(node, Scalar) and node.text == FUNCTION:
                message = FUNCTION_REFUSED
            if isinstance(node, Scalar) and node.text.endswith(".py"):
                message = f"must be {{script: {node.text}}} for a program of your own"
            if isinstance(node, Scalar) and " " in node.text.strip():
                message = f'must be {{command: "{node.text}"}} for a command'
            return self.refuse(node, key, message)
        # A resolved conf may name a function; a submit refuses it (jobs/programs/start.py).
        known_kinds = {**PROGRAM_KEYS, FUNCTION: ("args", "python")}
        kinds = [name for name in known_kinds if name in node.entries]
        if len(kinds) != 1:
            own = ("config", "launch", "arguments", "args", "python", "snapshot")
            known = [*PROGRAM_KEYS, *own]
            for name, entry in node.entries.items():
                if name not in known:
                    message = f"unknown key; {suggest(name, known)}"
                    self.note(entry.where, join_key(key, name), entry.node, message)
            *others, last = PROGRAM_KEYS
            return self.refuse(node, key, f"must have one of {', '.join(others)} and {last}")
        kind = kinds[0]
        values: dict[str, Any] = {"kind": kind}
        for name, entry in node.entries.items():
            inner = join_key(key, name)
            self.lines[inner] = entry.where
            if name in ("command", "args") and isinstance(entry.node, Scalar):
                values[name] = () if entry.node.is_null else self.read_words(entry.node, inner)
            elif name == kind and name not in ("module", "command"):
                values["path"] = self.read_value(entry.node, str, inner)
            elif name in (kind, *known_kinds[kind]):
                values[name] = self.read_value(entry.node, get_hints(Program)[name], inner)
            else:
                message = f"unknown key; {suggest(name, [kind, *known_kinds[kind]])}"
                self.note(entry.where, inner, entry.node, message)
        return FAILED if FAILED in values.values() else Program(**values)

    def read_words(self, node: Scalar, key: str) -> Any:
        """Split arguments in one text as a shell would, without expansion."""
        problem = find_text_problem(node.text)
        if problem:
            return self.refuse(node, key, problem)
        try:
            words = tuple(shlex.split(node.text))
        except ValueError as error:
            return self.refuse(node, key, f"cannot be split as a shell would: {error}")
        self.lines.update({f"{key}[{index}]": node.where for index in range(len(words))})
        return words

    def read_model(self, node: Node, key: str) -> Any:
        if isinstance(node, Scalar) and node.text in MODELS:
            return MODELS[node.text]
        if isinstance(node, Table):
            return self.read_record(node, Model, key)
        message = MODEL_ALLOWED
        if isinstance(node, Scalar) and not node.is_null:
            message = f"unknown model; {suggest(node.text, MODELS, what='names')}"
            message += " A shape of your own is a mapping with layers, hidden and heads"
        return self.refuse(node, key, message)

    def refuse(self, node: Node, key: str, message: str) -> Any:
        self.note(self.lines.get(key, node.where), key, node, message)
        return FAILED

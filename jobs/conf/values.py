"""What a conf value may be: one scalar against one type, in words and in values.

The field's type decides, never YAML's guess: `12:30`, `0-11-8` and `no` are text in a text field,
`1e-5` is a number in a number field, and environment values are the text that was written.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin

from vjob.jobs.conf.yaml_tree import Items, Node, Scalar, Table

FAILED: Final = object()
"""Stands for a value whose problem has been noted; None is a value."""

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
_ORDER = {bool: 1, int: 2, float: 3, str: 4}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def get_members(hint: Any) -> tuple[Any, ...]:
    """Members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_optional(hint: Any) -> bool:
    return types.NoneType in get_members(hint)


def is_scalar(hint: Any) -> bool:
    return hint in _WORDS or hint is Any or get_origin(hint) is Literal


def describe(hint: Any) -> str:
    """The type in words, such as `a whole number or auto`."""
    members = [member for member in get_members(hint) if member is not types.NoneType]
    if len(members) > 1 or (is_optional(hint) and not is_dataclass(members[0])):
        words = [describe(member) for member in members]
        return " or ".join([*words, "null"] if is_optional(hint) else words)
    member, origin, args = members[0], get_origin(members[0]), get_args(members[0])
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        each = {int: "whole numbers", float: "numbers", str: "text"}.get(args[0], "mappings")
        return f"a list of {'' if args[-1] is ... else f'{len(args)} '}{each}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of names to {'numbers' if args[1] is float else 'values'}"
    return "a mapping" if is_dataclass(member) else _WORDS.get(member, "a value")


def parse_scalar(node: Scalar, hint: Any) -> Any:
    """The value of one scalar, or FAILED."""
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
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == node.text), FAILED)
    if hint is str:
        return FAILED if node.is_null else node.text
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
    """A value without a type of its own: null, a truth, a whole number, else exactly its text."""
    if node.is_null:
        return None
    for hint in (bool, int, str):
        value = _parse_member(node, hint)
        if value is not FAILED:
            return value
    return FAILED


def find_text_problem(text: str) -> str:
    """Why no program could be given this text; empty where it could."""
    if "\0" in text:
        return "must not contain a NUL character"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "must not contain half of a surrogate pair"
    return ""


def suggest(word: str, words: Iterable[str], *, what: str = "keys") -> str:
    """`did you mean "x"?`, or the list of what there is."""
    import difflib  # only on the way to an error

    known = list(words)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else f"valid {what}: {', '.join(known)}"


def kind_of(node: Node) -> str:
    return {Scalar: "a value", Items: "a list", Table: "a mapping"}[type(node)]

"""`--set key=value`: one key of the tree replaced before it is read, to meet the same checks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vjob.jobs.conf.redact import show
from vjob.jobs.conf.yaml_tree import (
    MAX_DEPTH,
    Entry,
    Items,
    Node,
    Scalar,
    Table,
    join_key,
    parse_tree,
)
from vjob.jobs.errors import ConfError, Problem

WHERE = "--set"
_STEP = re.compile(r"[^.\[\]\s=]+|\[[0-9]{1,6}\]")
_KEY = re.compile(r"[^.\[\]\s=]+(\[[0-9]{1,6}\]|\.[^.\[\]\s=]+)*")


class _UnusableError(Exception):
    """The override has no place in this conf."""


def apply_overrides(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """The tree with each override in its place; the last of two for one key wins."""
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _KEY.fullmatch(key):
            message = "write --set key=value, such as --set train.steps=100"
            problems.append(Problem(where=WHERE, key=show("", override), value="", message=message))
            continue
        try:
            value, noted = parse_tree(text, WHERE)
            problems.extend(noted)
            steps = _STEP.findall(key)
            if len(steps) > MAX_DEPTH:
                raise _UnusableError(f"nested more than {MAX_DEPTH} deep")
            tree = _replace(tree, steps, value, "")
        except ConfError as error:
            message = error.problems[-1].message
            problems.append(Problem(where=WHERE, key=key, value=show(key, text), message=message))
        except _UnusableError as error:
            shown = show(key, value)
            problems.append(Problem(where=WHERE, key=key, value=shown, message=str(error)))
    return tree, problems


def _replace(node: Node, steps: Sequence[str], value: Node, path: str) -> Node:
    """A copy of the node with the value at the end of the steps; nodes may be shared by aliases."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if step.startswith("["):
        return _replace_item(node, int(step[1:-1]), rest, value, path)
    if isinstance(node, Scalar) and node.is_null:
        node = Table(entries={}, where=WHERE)
    if not isinstance(node, Table):
        kind = "a list; give an index" if isinstance(node, Items) else f'"{show(path, node)}"'
        raise _UnusableError(f"{path or 'the conf'} is {kind}, so it has no key {step}")
    old = node.entries.get(step)
    inside: Node = old.node if old is not None else Table(entries={}, where=WHERE)
    if old is None and rest and rest[0].startswith("["):
        inside = Items(items=(), where=WHERE)
    new = _replace(inside, rest, value, join_key(path, step))
    where = old.where if old is not None and rest else WHERE
    entry = Entry(node=new, where=where)
    return Table(entries={**node.entries, step: entry}, where=node.where)


def _replace_item(node: Node, index: int, rest: Sequence[str], value: Node, path: str) -> Node:
    if not isinstance(node, Items):
        raise _UnusableError(f"{path or 'the conf'} is not a list")
    if index >= len(node.items):
        count = len(node.items)
        raise _UnusableError(f"{path} has {count} entries, counted from 0")
    items = list(node.items)
    items[index] = _replace(items[index], rest, value, f"{path}[{index}]")
    return Items(items=tuple(items), where=node.where)

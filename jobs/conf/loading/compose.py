"""Merge a conf with the files that it includes, and fill its references: `include: base.yaml`, and
`${train.steps}`.

    conf.yaml ─┐ include: [a.yaml, b.yaml]
    a.yaml ────┤ read first, mappings merged key by key, the later one wins ─► --set ─► references
    b.yaml ────┘ (the file itself is the last)

A value that is one reference, `${parallel.pipeline}`, becomes that key's value, a list or a mapping
too; within a text a reference is that value's text. `$${` stands for `${`. `program.args` and `env`
are filled later, where the layout is known (jobs/conf/references.py); shell text, `setup` and
`notify.command`, and the regular expression `progress` keep each `$` as it is.

Refused: an include or a reference that comes back to itself, and what would grow without bound.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from varuna_core.records.secrets import is_secret
from vjob.jobs.conf.parse import get_hints, get_members
from vjob.jobs.conf.paths import resolve_path
from vjob.jobs.conf.redact import show
from vjob.jobs.conf.references import REFERENCE, STEP, is_kept_literal, suggest_reference
from vjob.jobs.conf.schema import MODELS, JobConf
from vjob.jobs.conf.yaml_tree import (
    MAX_NODES,
    Items,
    Node,
    Scalar,
    Table,
    TableEntry,
    join_key,
    parse_tree,
)
from vjob.jobs.errors import ConfError, Problem

INCLUDE = "include"
MOST_FILES = 64
MOST_STEPS = 50
"""The most references that may follow from one to the next."""
MOST_CHARS = 64 * 1024
"""The most characters of a text after its references are filled."""
ReadText = Callable[[Path, str], str]


def merge(under: Node, over: Node) -> Node:
    """Merge mappings key by key; otherwise the second value replaces the first."""
    if not isinstance(under, Table) or not isinstance(over, Table):
        return over
    entries = dict(under.entries)
    for name, entry in over.entries.items():
        old = entries.get(name)
        node = entry.node if old is None else merge(old.node, entry.node)
        entries[name] = TableEntry(node=node, where=entry.where)
    return Table(entries=entries, where=over.where)


def include_files(
    tree: Node, source: str, base: Path, read_text: ReadText, environ: Mapping[str, str]
) -> tuple[Node, list[Problem]]:
    """Return the tree merged over the files that it includes, and the problems of these files."""
    files = _Files(read_text=read_text, environ=environ)
    return files.include(tree, source, base, (os.path.realpath(base / Path(source).name),))


def refuse_include(tree: Node) -> tuple[Node, list[Problem]]:
    """Refuse `include` in a conf that is not a file; return the tree without it."""
    entry = tree.entries.get(INCLUDE) if isinstance(tree, Table) else None
    if entry is None or not isinstance(tree, Table):
        return tree, []
    own = {name: one for name, one in tree.entries.items() if name != INCLUDE}
    message = "only a conf file can include others"
    problem = Problem(where=entry.where, key=INCLUDE, value="", message=message)
    return Table(entries=own, where=tree.where), [problem]


@dataclass(kw_only=True)
class _Files:
    read_text: ReadText
    environ: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)
    trees: dict[str, Node] = field(default_factory=dict)
    """Each file's tree with its includes, by its real path."""

    def include(
        self, tree: Node, source: str, base: Path, stack: tuple[str, ...]
    ) -> tuple[Node, list[Problem]]:
        entry = tree.entries.get(INCLUDE) if isinstance(tree, Table) else None
        if entry is None or not isinstance(tree, Table):
            return tree, self.problems
        own = {name: one for name, one in tree.entries.items() if name != INCLUDE}
        merged: Node = Table(entries={}, where=tree.where)
        items = entry.node.items if isinstance(entry.node, Items) else (entry.node,)
        for item in items:
            if not isinstance(item, Scalar) or item.is_null or not item.text:
                self.note(entry.where, "", "must be the name of a file, or a list of them")
                continue
            merged = merge(merged, self.read(item, source, base, stack))
        return merge(merged, Table(entries=own, where=tree.where)), self.problems

    def read(self, name: Scalar, source: str, base: Path, stack: tuple[str, ...]) -> Node:
        empty = Table(entries={}, where=name.where)
        path = Path(resolve_path(name.text, base, self.environ))
        real = os.path.realpath(path)
        if real in stack:
            chain = " > ".join(os.path.basename(one) for one in (*stack[stack.index(real) :], real))
            self.note(name.where, name.text, f"includes itself: {chain}")
            return empty
        if real in self.trees:
            return self.trees[real]
        if len(self.trees) >= MOST_FILES:
            self.note(name.where, name.text, f"more than {MOST_FILES} files are included")
            return empty
        self.trees[real] = empty
        shown = os.path.normpath(Path(source).parent / Path(name.text).expanduser())
        try:
            text = self.read_text(path, shown)
            tree, problems = parse_tree(text, shown)
        except ConfError as error:
            self.problems += [
                one if one.where != shown else self.place(name, one.message)
                for one in error.problems
            ]
            return empty
        self.problems += problems
        if isinstance(tree, Scalar) and tree.is_null:
            tree = empty
        if not isinstance(tree, Table):
            self.note(name.where, name.text, "must be a conf, a mapping of keys")
            return empty
        found, _ = self.include(tree, shown, path.parent, (*stack, real))
        self.trees[real] = found
        return found

    def note(self, where: str, value: str, message: str) -> None:
        self.problems.append(Problem(where=where, key=INCLUDE, value=value, message=message))

    def place(self, name: Scalar, message: str) -> Problem:
        return Problem(where=name.where, key=INCLUDE, value=name.text, message=message)


def fill_tree(tree: Node) -> tuple[Node, list[Problem]]:
    filler = _Filler(root=tree)
    return filler.fill(tree, ""), filler.problems


class _UnfilledError(Exception):
    """Raised if a reference cannot be filled; says why."""


@dataclass(kw_only=True)
class _Filler:
    root: Node
    problems: list[Problem] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    """Keys being looked up, each referred to by the previous one."""
    values: dict[str, Node] = field(default_factory=dict)
    count: int = 0
    """The number of values filled by reference."""

    def fill(self, node: Node, path: str) -> Node:
        if isinstance(node, Scalar):
            return node if is_kept_literal(path) else self.fill_text(node, path)
        if isinstance(node, Items):
            items = tuple(self.fill(one, f"{path}[{at}]") for at, one in enumerate(node.items))
            return Items(items=items, where=node.where)
        entries = {
            name: TableEntry(
                node=self.fill(entry.node, join_key(path, name) if path else name),
                where=entry.where,
            )
            for name, entry in node.entries.items()
        }
        return Table(entries=entries, where=node.where)

    def fill_text(self, node: Scalar, path: str) -> Node:
        """Return the node with references filled; unchanged, with a problem, if one cannot be."""
        if "${" not in node.text:
            return node
        try:
            return self.expand(node, path)
        except _UnfilledError as error:
            shown = show(path, node)
            problem = Problem(where=node.where, key=path, value=shown, message=str(error))
            self.problems.append(problem)
            return node

    def expand(self, node: Scalar, path: str) -> Node:
        whole = REFERENCE.fullmatch(node.text)
        if whole is not None and whole[1] is not None:
            found = self.find(whole[1].strip(), whole[0], path)
            if isinstance(found, Scalar):
                return Scalar(text=found.text, plain=found.plain, where=node.where)
            if _holds_secret(found) and path.rpartition(".")[2] != "env":
                raise _UnfilledError(f"{whole[0]} contains a secret: pass it by env or pass_env")
            return found
        text, end = [], 0
        for match in REFERENCE.finditer(node.text):
            text += [node.text[end : match.start()], self.spell(match, path)]
            end = match.end()
        filled = "".join([*text, node.text[end:]])
        if len(filled) > MOST_CHARS:
            raise _UnfilledError(
                f"is longer than {MOST_CHARS} characters after its references are expanded"
            )
        return Scalar(text=filled, plain=node.plain, where=node.where)

    def spell(self, match: re.Match[str], path: str) -> str:
        if match[0] == "$${":
            return "${"
        if match[1] is None:
            raise _UnfilledError(f"{match[0]} is not closed by }}; for a literal ${{ write $${{")
        found = self.find(match[1].strip(), match[0], path)
        if not isinstance(found, Scalar):
            raise _UnfilledError(
                f"{match[0]} is a list or a mapping, which cannot be a part of a text"
            )
        return found.text

    def find(self, key: str, spelled: str, path: str) -> Node:
        """Return the filled value of a key, or else its default."""
        if key in self.active:
            chain = " > ".join([*self.active[self.active.index(key) :], key])
            raise _UnfilledError(f"{spelled} refers back to itself: {chain}")
        if key == path or path.startswith((f"{key}.", f"{key}[")):
            raise _UnfilledError(f"{spelled} would hold itself")
        if len(self.active) >= MOST_STEPS:
            raise _UnfilledError(f"{spelled} refers through more than {MOST_STEPS} keys")
        if is_secret(key) and not is_secret(path):
            raise _UnfilledError(f"{spelled} is a secret: pass it by env or pass_env")
        if key not in self.values:
            self.active.append(key)
            try:
                self.values[key] = self.look_up(key, spelled)
            finally:
                self.active.pop()
        found = self.values[key]
        self.count += _count(found, MAX_NODES)
        if self.count > MAX_NODES:
            raise _UnfilledError(f"{spelled} expands to more than {MAX_NODES} values")
        if isinstance(found, Scalar) and found.plain and found.text == "auto":
            raise _UnfilledError(
                f"{spelled} is auto, which is not known yet: write {key}, or refer to it in "
                "program.args or env"
            )
        if isinstance(found, Scalar) and found.is_null:
            raise _UnfilledError(f"{spelled} has no value: set {key}")
        return found

    def look_up(self, key: str, spelled: str) -> Node:
        node: Node | None = self.root
        hint: Any = JobConf
        for name, index in _split(key, spelled):
            step = index or name
            if isinstance(node, Scalar) and not node.is_null:
                node = self.expand(node, key)
            hint = _step_hint(hint, name)
            if index and isinstance(node, Items) and int(index) < len(node.items):
                node = node.items[int(index)]
            elif name and isinstance(node, Table) and name in node.entries:
                node = node.entries[name].node
            elif name and isinstance(node, Scalar) and node.text in MODELS:
                node = _to_node(getattr(MODELS[node.text], step, MISSING), node.where)
            elif name and (not isinstance(node, (Scalar, Items)) or _is_null(node)):
                node = None
                if hint is None:
                    raise _UnfilledError(f"{spelled} is not a conf key; {suggest_reference(key)}")
                if isinstance(hint, _Default):
                    node = _to_node(hint.value, self.root.where)
            else:
                raise _UnfilledError(f"{spelled} is not a conf key; {suggest_reference(key)}")
        if node is None:
            raise _UnfilledError(f"{spelled} has no value: set {key}")
        return self.fill_all(node, key)

    def fill_all(self, node: Node, key: str) -> Node:
        """Fill a referenced value completely, including texts in `env` and similar keys."""
        if isinstance(node, Scalar):
            return self.expand(node, key) if "${" in node.text else node
        if isinstance(node, Items):
            items = (self.fill_all(one, f"{key}[{at}]") for at, one in enumerate(node.items))
            return Items(items=tuple(items), where=node.where)
        entries = {
            name: TableEntry(node=self.fill(entry.node, f"{key}.{name}"), where=entry.where)
            for name, entry in node.entries.items()
        }
        return Table(entries=entries, where=node.where)


@dataclass(frozen=True)
class _Default:
    """The default of a key that holds a value itself."""

    value: Any


def _split(key: str, spelled: str) -> list[tuple[str, str]]:
    steps = STEP.findall(key)
    if not steps or "".join(name or f"[{index}]" for name, index in steps) != key.replace(".", ""):
        raise _UnfilledError(f"{spelled} is not a conf key; {suggest_reference(key)}")
    return [(name, index) for name, index in steps]


def _step_hint(hint: Any, name: str) -> Any:
    """Return the class, or the default, of a key inside another; None for an unknown key."""
    if not name:  # an index: what the list holds
        return hint
    for member in get_members(hint):
        inner = get_args(member)[0] if get_origin(member) is tuple else member
        if is_dataclass(inner) and isinstance(inner, type):
            found = {one.name: one for one in fields(inner)}.get(name)
            if found is None:
                return None
            if found.default_factory is not MISSING:
                default = found.default_factory()
                return get_hints(inner)[name] if is_dataclass(default) else _Default(default)
            if found.default is MISSING or found.default is None or found.default == ():
                return get_hints(inner)[name]
            return _Default(found.default)
    return None


def _to_node(value: Any, where: str) -> Node | None:
    """Convert a key's default to a YAML node, as if the default were written in the conf; None if
    the key has no default."""
    if value is MISSING:
        return None
    if isinstance(value, tuple):
        items = [_to_node(one, where) for one in value]
        return Items(items=tuple(one for one in items if one is not None), where=where)
    if isinstance(value, Mapping):
        return Table(entries={}, where=where)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Scalar(text=text, plain=True, where=where)


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.is_null


def _holds_secret(node: Node) -> bool:
    """Return True if a key inside the node is that of a secret."""
    if isinstance(node, Items):
        return any(map(_holds_secret, node.items))
    if not isinstance(node, Table):
        return False
    return any(is_secret(name) or _holds_secret(one.node) for name, one in node.entries.items())


def _count(node: Node, most: int) -> int:
    """Count the values in a node, stopping one beyond the limit."""
    count, left = 0, [node]
    while left and count <= most:
        one = left.pop()
        count += 1
        if isinstance(one, Items):
            left += one.items
        elif isinstance(one, Table):
            left += [entry.node for entry in one.entries.values()]
    return count

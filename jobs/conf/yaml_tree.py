"""Parse YAML text into a tree in which every key and every value knows its line.

PyYAML's own loader forgets lines, keeps the last of two equal keys, guesses types (`12:30` is 750,
`1e-5` is text) and expands aliases without bound. So this module uses its events: scalars keep
their text and quoting, and the field that they fill decides what they mean. Refused: tags, several
documents, keys given twice, keys that are not text, and documents too large for a conf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from vjob.jobs.errors import ConfError, Problem

MAX_CHARS = 256 * 1024
MAX_NODES = 20_000
MAX_DEPTH = 20
NULLS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A YAML scalar, kept as text; the conf's key to which it belongs decides its type."""

    text: str
    plain: bool
    """True if the scalar was written without quotes; in quotes, null, true and 3 are text."""
    where: str

    @property
    def is_null(self) -> bool:
        return self.plain and self.text in NULLS


@dataclass(frozen=True, kw_only=True)
class Items:
    items: tuple[Node, ...]
    where: str


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """The value of a key in a mapping."""

    node: Node
    where: str
    """Place of the key; a long value may begin elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A mapping with merge keys resolved."""

    entries: Mapping[str, TableEntry]
    where: str


Node = Scalar | Items | Table


def join_key(parent: str, name: str) -> str:
    """Join `cluster` and `nodes` to `cluster.nodes`."""
    return f"{parent}.{name}" if parent else name


@dataclass(frozen=True, kw_only=True)
class _Built:
    node: Node
    size: int
    depth: int


@dataclass(kw_only=True)
class _Frame:
    where: str
    anchor: str | None
    is_table: bool
    children: list[_Built] = field(default_factory=list)


class _RefusedError(Exception):
    """Raised if the rest of the document cannot be read."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _Builder:
    """Builds nodes from parser events; aliases share their node, and their size is counted."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.stack: list[_Frame] = []
        self.anchors: dict[str, _Built | None] = {}
        self.root: _Built | None = None
        self.count = 0

    def feed(self, event: yaml.Event) -> None:
        assert event.start_mark is not None, "PyYAML sets start_mark on every event that it parses"
        line = event.start_mark.line + 1
        where = self.place(line)
        if isinstance(event, yaml.DocumentStartEvent):
            if self.root is not None:
                raise _RefusedError(line, "a second document starts here; a conf is one document")
        elif isinstance(event, yaml.AliasEvent):
            self.add(self.follow(event.anchor or "", line), line)
        elif isinstance(event, yaml.ScalarEvent):
            self.check_tag(event.tag, where)
            plain = event.style is None and event.tag is None
            scalar = Scalar(text=event.value, plain=plain, where=where)
            built = _Built(node=scalar, size=1, depth=0)
            if event.anchor is not None:
                self.anchors[event.anchor] = built
            self.add(built, line)
        elif isinstance(event, yaml.CollectionStartEvent):
            self.check_tag(event.tag, where)
            if len(self.stack) >= MAX_DEPTH:
                raise _RefusedError(line, f"nested more than {MAX_DEPTH} levels deep")
            if event.anchor is not None:
                self.anchors[event.anchor] = None
            is_table = isinstance(event, yaml.MappingStartEvent)
            self.stack.append(_Frame(where=where, anchor=event.anchor, is_table=is_table))
        elif isinstance(event, yaml.CollectionEndEvent):
            self.close(line)

    def place(self, line: int) -> str:
        return f"{self.source}:{line}" if self.source != "--set" else self.source

    def follow(self, anchor: str, line: int) -> _Built:
        if anchor not in self.anchors:
            raise _RefusedError(line, f"*{anchor} has no &{anchor} before it")
        built = self.anchors[anchor]
        if built is None:
            raise _RefusedError(line, f"*{anchor} is inside &{anchor}: it would never end")
        return built

    def add(self, built: _Built, line: int) -> None:
        self.count += built.size
        if self.count > MAX_NODES:
            raise _RefusedError(line, f"more than {MAX_NODES} values, aliases expanded")
        if len(self.stack) + built.depth > MAX_DEPTH:
            raise _RefusedError(line, f"nested more than {MAX_DEPTH} levels deep, aliases expanded")
        if self.stack:
            self.stack[-1].children.append(built)
        else:
            self.root = built

    def close(self, line: int) -> None:
        frame = self.stack.pop()
        children = frame.children
        node: Node
        if frame.is_table:
            node = self.build_table(frame)
        else:
            node = Items(items=tuple(child.node for child in children), where=frame.where)
        size = 1 + sum(child.size for child in children)
        depth = 1 + max((child.depth for child in children), default=0)
        built = _Built(node=node, size=size, depth=depth)
        if frame.anchor is not None:
            self.anchors[frame.anchor] = built
        self.count -= size - 1  # the children were counted when they came
        self.add(built, line)

    def build_table(self, frame: _Frame) -> Table:
        entries: dict[str, TableEntry] = {}
        merged: dict[str, TableEntry] = {}
        for key, value in zip(frame.children[::2], frame.children[1::2], strict=True):
            name = key.node
            if not isinstance(name, Scalar):
                self.note(
                    name.where, self.path(), "", "a key must be text, not a list or a mapping"
                )
            elif name.plain and name.text == "<<":
                self.merge(merged, value.node, name.where)
            elif name.text in entries:
                first = entries[name.text].where.rpartition(":")[2]
                message = f"given twice; the first one is on line {first}"
                self.note(name.where, self.path(name.text), "", message)
            else:
                entries[name.text] = TableEntry(node=value.node, where=name.where)
        return Table(entries={**merged, **entries}, where=frame.where)

    def merge(self, merged: dict[str, TableEntry], node: Node, where: str) -> None:
        """Apply YAML's `<<`: keys in the mapping win, then the earlier of several merged ones."""
        for source in node.items if isinstance(node, Items) else (node,):
            if not isinstance(source, Table):
                self.note(where, self.path("<<"), "", "<< takes a mapping or a list of mappings")
                continue
            for name, entry in source.entries.items():
                merged.setdefault(name, entry)

    def path(self, name: str = "") -> str:
        """Return the dotted key of the YAML node being built, followed by `name` if given."""
        path = ""
        for frame in self.stack:
            last = frame.children[-1].node if frame.children else None
            if frame.is_table:
                path = join_key(path, last.text if isinstance(last, Scalar) else "?")
            else:
                path += f"[{len(frame.children)}]"
        return join_key(path, name) if name else path

    def check_tag(self, tag: str | None, where: str) -> None:
        if tag not in (None, "!", "tag:yaml.org,2002:str"):
            self.note(where, self.path(), "", f"tags are not supported in a conf; remove {tag}")

    def note(self, where: str, key: str, value: str, message: str) -> None:
        self.problems.append(Problem(where=where, key=key, value=value, message=message))


_MISTAKES: Sequence[tuple[str, bool, str]] = (
    (r"quoted scalar.*unexpected end", True, "the quote that opens in this line is never closed"),
    (r"flow mapping .*stream end", True, "the { of this line is never closed"),
    (r"flow sequence .*stream end", True, "the [ of this line is never closed"),
    (r"character '\\t'", False, "the line begins with a tab: indent with spaces"),
    (
        r"character '([@`%])'",
        False,
        "a value that begins with {} must be in quotes",
    ),
    (
        r"mapping values are not allowed",
        False,
        "a colon is not allowed here: quote a value that contains one, and start the keys of a "
        "mapping in the same column",
    ),
)
"""PyYAML's messages of common mistakes, whether the context has the line, and our words."""


def explain_error(error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Return line and message for a text that is not YAML."""
    said = " ".join(filter(None, (error.context, error.problem)))
    mark = error.problem_mark or error.context_mark
    for pattern, is_context, words in _MISTAKES:
        match = re.search(pattern, said)
        if match is not None:
            mark = (error.context_mark if is_context else None) or mark
            said = words.format(*match.groups()) if match.groups() else words
            break
    return (mark.line + 1 if mark is not None else 1), f"not YAML: {said}"


def parse_tree(text: str, source: str) -> tuple[Node, list[Problem]]:
    """Return the document and the problems of its keys; raise ConfError if it is not YAML."""
    builder = _Builder(source)
    try:
        if len(text) > MAX_CHARS:
            raise _RefusedError(1, f"larger than {MAX_CHARS // 1024} KiB; is this a conf?")
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.feed(event)
    except _RefusedError as refused:
        line, message = refused.line, str(refused)
    except yaml.MarkedYAMLError as error:
        line, message = explain_error(error)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not YAML: the character U+{ord(text[error.position]):04X} is not allowed"
    except (ValueError, OverflowError):  # PyYAML on "\UFFFFFFFF" and on endless %YAML versions
        line, message = 1, "not YAML: an escape or a version that does not exist"
    else:
        empty = Scalar(text="", plain=True, where=builder.place(1))
        return (builder.root.node if builder.root is not None else empty), builder.problems
    problem = Problem(where=builder.place(line), key="", value="", message=message)
    raise ConfError([*builder.problems, problem])

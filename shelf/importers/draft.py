"""The conf under construction, and its text below comments with the notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from varuna_core.records.secrets import redact_string
from vjob.jobs.conf.document import render_value
from vjob.shelf.importers.bash.passes import Variable
from vjob.shelf.importers.bash.recording import Word
from vjob.shelf.importers.launchers import Lines
from vjob.shelf.importers.script import ShellConf

HEAD = """\
# Translated from {name}. `vjob submit --dry-run` shows what it makes.
"""
SECTIONS = (
    "name", "program", "model", "data", "train", "parallel", "cluster", "container", "workdir",
    "setup", "profile", "env", "pass_env",
)  # fmt: skip
"""Sections in the order in which `vjob init` prints them."""


class Draft:
    """The keys found so far, and a note for each variable, option and line that has no key."""

    def __init__(
        self,
        found: ShellConf,
        lines: Lines,
        files: Mapping[str, str],
        environ: Mapping[str, str],
    ) -> None:
        self.found = found
        self.lines = lines
        self.files = files
        self.environ = environ
        self.added: dict[str, tuple[Word, str]] = {}
        """Environment variables from options and files, each with the place that sets it."""
        self.notes: list[str] = []
        """Notes on what was ignored or needs a look, with reasons."""
        self.num_first = 0
        self.taken: list[str] = []
        """Lines that tell the user which part of the script became which key of the conf."""
        self.values: dict[str, Any] = {}
        """Values by dotted key."""
        self.groups: list[dict[str, Any]] = []

    def note(self, message: str, *, is_first: bool = False) -> None:
        """Add a note, unless it exists; `is_first` puts it above the others, for keys that checks
        refused."""
        message = _make_printable(message)
        if message in self.notes:
            return
        if is_first:
            self.notes.insert(self.num_first, message)
            self.num_first += 1
        else:
            self.notes.append(message)

    def record(self, what: str, key: str) -> None:
        """Record that `what`, such as an option or variable of the script, became the key `key`."""
        line = f"{_make_printable(redact_string(what))} -> {key}"
        if line not in self.taken:
            self.taken.append(line)

    def put(self, key: str, value: Any, what: str) -> None:
        """Set a key, unless it is already set to another value, which is kept and noted."""
        if key in self.values and self.values[key] != value:
            self.note(f"{redact_string(what)} is not used: {key} is already {self.values[key]}")
            return
        self.values[key] = value
        self.record(what, key)

    def add(self, name: str, value: str, where: str) -> None:
        """Add a variable for every rank that comes from an option or from another file than the
        script."""
        self.added[name] = (Word(value), where)

    def shorten(self, path: str) -> str:
        """Shorten a path for the conf: relative to the scripts' folder, or with `~` for home."""
        if path.startswith(f"{self.found.folder}/"):
            return path.removeprefix(f"{self.found.folder}/")
        home = self.environ.get("HOME")
        if home and (path == home or path.startswith(home + "/")):
            return "~" + path.removeprefix(home)
        return path

    def read_line(self, file: str, number: int) -> str:
        """Return a line of a script of the folder; empty if there is none."""
        return next(iter(self.files.get(file, "").splitlines()[number - 1 : number]), "")

    def expand(self, text: str) -> str:
        """Escape `${` in a word, since the conf would read it as a reference to a key."""
        return text.replace("${", "$${")  # the conf's own references are written so


def place(one: Variable) -> str:
    return f"{one.file}:{one.line}"


def spell(name: str, text: str) -> str:
    """Write a variable as `NAME=value` for a note to the user; a secret value is hidden, and what
    cannot be printed becomes `?`."""
    return _make_printable(redact_string(f"{name}={text}"))


def _make_printable(text: str) -> str:
    """Replace each character that cannot be printed with `?`."""
    return "".join(char if char.isprintable() else "?" for char in text)


def render_page(draft: Draft, title: str, notes: Sequence[str]) -> str:
    """Render the file: notes and the keys' origins as comments, then the conf."""
    lines = [HEAD.format(name=title)]
    for head, items in (("Left out, or to be checked", notes), ("Taken", draft.taken)):
        if items:
            lines.append(f"#\n# {head}:\n")
            lines += [f"#   {item}\n" for item in items]
    return "".join(lines) + render_draft(draft)


def render_draft(draft: Draft) -> str:
    """Render the conf without comments."""
    return _render(_build_tree(draft))


def _build_tree(draft: Draft) -> dict[str, Any]:
    """Build the conf as nested mappings, with the sections in order."""
    tree: dict[str, Any] = {}
    for section in SECTIONS:
        for key, value in draft.values.items():
            first, *rest = key.split(".")
            if first != section:
                continue
            if not rest:
                tree[first] = value
                continue
            inner = tree.setdefault(first, {})
            for name in rest[:-1]:
                inner = inner.setdefault(name, {})
            inner[rest[-1]] = value
        if section == "cluster" and draft.groups:
            tree.setdefault("cluster", {})["nodes"] = draft.groups
    return tree


def _render(conf: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for key, value in conf.items():
        if isinstance(value, dict) and key not in ("program", "env"):
            inner = {name: item for name, item in value.items() if item not in ({}, [])}
            if inner:
                lines.append(f"{key}:")
            for name, item in inner.items():
                lines += _render_key("  ", name, item)
        elif value not in (None, {}, []):
            lines += _render_key("", key, value)
    return "\n".join(lines) + "\n"


def _render_key(indent: str, name: str, value: Any) -> list[str]:
    if name == "nodes":
        groups = [{key: item for key, item in group.items() if item is not None} for group in value]
        return [f"{indent}nodes:", *(f"{indent}  - {render_value(group)}" for group in groups)]
    return [f"{indent}{name}: {render_value(value)}"]

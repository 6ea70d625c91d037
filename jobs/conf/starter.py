"""The commented conf.yaml that `vjob init` writes: every key, the few needed ones active."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from vjob.jobs.conf.document import get_default, get_doc, get_section_class, render_value
from vjob.jobs.conf.parse import get_hints
from vjob.jobs.conf.schema import JobConf, Model, NodeGroup, Program
from vjob.jobs.conf.values import describe
from vjob.jobs.conf.yaml_tree import join_key

# Runs anywhere, without data, as it is.
STARTER: Mapping[str, object] = {
    "name": "my-run",
    "program": {"script": "train.py", "args": ["--lr", "1.5e-4"]},
    "parallel.pipeline": 1,
    "cluster.walltime_min": 60,
    "cluster.nodes[].group": "master",
    "cluster.nodes[].count": 1,
    "cluster.nodes[].ranks": 1,
}
FORMS: Mapping[type, tuple[str, ...]] = {
    Program: (
        "or pretrain_gpt, or pretrain_bert: they need model and data",
        "or {megatron: Megatron-LM, args: [...]}",
        "or {deepspeed: train.py, config: ds.json, args: [...]}",
    ),
    Model: ("or {layers: 12, hidden: 768, heads: 12, sequence: 1024, vocab: 50257, dropout: 0.1}",),
}
HEAD = """\
# A conf of vjob. Set program.script first: your training script, which every rank runs.
# Keys that begin with # show their defaults; docs/conf.md explains them all.
# Paths are relative to this file's folder. `vjob submit --dry-run` shows what a conf makes.
"""
_COLUMNS = 100


def render_init() -> str:
    """The starter conf; with every #key made active it is a conf too."""
    return HEAD + "\n".join(_render_section(JobConf, "", "")) + "\n"


def _render_section(cls: type, key: str, indent: str) -> Iterator[str]:
    hints = get_hints(cls)
    for field in fields(cls):
        inner = get_section_class(hints[field.name])
        path = join_key(key, field.name)
        doc = get_doc(cls, field.name)
        if not indent and (inner is not None or not key):
            yield ""
        if inner in FORMS:
            value = STARTER.get(path, "gpt2-small")
            yield from _render_key(indent, field.name, value, doc, active=path in STARTER)
            yield from (f"{indent}# {form}" for form in FORMS[inner or Model])
        elif inner is NodeGroup:
            yield f"{indent}{field.name}:  # {doc}"
            yield from _render_item(inner, path + "[]", indent + "  ")
        elif inner is not None:
            yield f"{indent}{field.name}:  # {doc}"
            yield from _render_section(inner, path, indent + "  ")
        else:
            yield from _render_field(field, hints[field.name], path, indent, doc)


def _render_field(field: Any, hint: Any, path: str, indent: str, doc: str) -> Iterator[str]:
    allowed = describe(hint)
    if allowed.startswith("one of "):
        doc = f"{allowed.removeprefix('one of ').replace(', ', ' | ')}. {doc}"
    default = STARTER.get(path, get_default(field))
    assert default is not MISSING, f"STARTER must give {path}"
    yield from _render_key(indent, field.name, default, doc, active=path in STARTER)


def _render_item(cls: type, key: str, indent: str) -> Iterator[str]:
    """The fields of one list item; the first one, which is active, carries the dash."""
    first, *others = _render_section(cls, key, indent + "  ")
    yield f"{indent}- {first.strip()}"
    yield from others


def _render_key(indent: str, name: str, value: object, doc: str, *, active: bool) -> Iterator[str]:
    line = f"{indent}{'' if active else '#'}{name}: {render_value(value)}"
    beside = f"{line:<34}  # {doc}"
    if len(beside) <= _COLUMNS:
        yield beside
        return
    prefix = f"{indent}# "
    yield from textwrap.wrap(doc, _COLUMNS, initial_indent=prefix, subsequent_indent=prefix)
    yield line

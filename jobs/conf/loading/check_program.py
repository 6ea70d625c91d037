"""Checks of a program's launch, and how to write a command that stands where a script should."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from itertools import dropwhile
from pathlib import PurePath
from typing import Any

from vjob.jobs.conf.layout import get_world
from vjob.jobs.conf.references import find_value, list_referenced
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.write import dump_yaml
from vjob.jobs.errors import KeyProblem
from vjob.jobs.programs.launchers import is_python, split_module
from vjob.jobs.programs.start import list_layout_keys


def find_launch_problems(
    conf: JobConf, launch: str, written: Collection[str]
) -> Iterator[KeyProblem]:
    """Settings of the conf that the launch cannot have."""
    key, world = "program.launch", get_world(conf)
    layout = list_layout_keys(written)
    if launch == "python":
        if world > 1:
            message = (
                f"is one process, and cluster.nodes has {world} ranks: use torchrun, or one rank"
            )
            yield key, launch, message
        if conf.morph.enabled:
            yield key, launch, "cannot be with morph.enabled, whose ranks meet: use torchrun"
    if launch == "node" and conf.morph.enabled and conf.morph.layout != "world":
        message = "must be world with program.launch: node, whose program lays out its own ranks"
        yield "morph.layout", conf.morph.layout, message
    if launch in ("python", "node") and layout and not (launch == "python" and world > 1):
        referenced = list_referenced(conf)
        for name in layout:
            if name not in referenced:
                message = (
                    f"has no effect with program.launch: {launch}: remove it, or pass it as "
                    f"${{{name}}} in program.args, or use launch: torchrun"
                )
                yield name, find_value(conf, name), message


def suggest_program(text: str) -> str:
    """The way to write a command that stands where a script should; empty for one word."""
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    if len(words) < 2:
        return ""
    program: dict[str, Any] = {"command": words}
    if is_python(PurePath(words[0]).name):
        module, args = split_module(words[1:])
        rest = words[1:] if module else [*dropwhile(lambda word: word.startswith("-"), words[1:])]
        if module:
            program = {"module": module, "args": [*args]}
        elif rest:
            program = {"script": rest[0], "args": rest[1:]}
    elif words[0].endswith(".py"):
        program = {"script": words[0], "args": words[1:]}
    return f"; write program: {dump_yaml(program, one_line=True).strip()}"

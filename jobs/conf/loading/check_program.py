"""Check a program's launch, and suggest a spelling for a command given instead of a script."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator
from itertools import dropwhile
from pathlib import PurePath

from vjob.jobs.conf.references import find_value, list_referenced
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.world_size import get_world
from vjob.jobs.errors import KeyProblem
from vjob.jobs.programs.launchers import is_python, split_module
from vjob.jobs.programs.start import list_layout_keys


def find_launch_problems(
    conf: JobConf, launch: str, written: Collection[str]
) -> Iterator[KeyProblem]:
    """Yield settings of the conf that this launch does not allow."""
    key, world = "program.launch", get_world(conf)
    layout = list_layout_keys(written)
    if launch == "python":
        if world > 1:
            message = (
                f"runs one process, but cluster.nodes has {world} ranks: use torchrun, or one rank"
            )
            yield key, launch, message
        if conf.morph.enabled:
            yield key, launch, "conflicts with morph.enabled, whose ranks communicate: use torchrun"
    if launch == "node" and conf.morph.enabled and conf.morph.mode != "world":
        message = "must be 'world' with program.launch: node, whose program places its own ranks"
        yield "morph.mode", conf.morph.mode, message
    if launch == "node" and conf.profile.ranks != "all":
        message = "is for single ranks, but program.launch: node uses a launcher: remove it"
        yield "profile.ranks", conf.profile.ranks, message
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
    """Suggest how to write a command that was given as a script; empty for a single word."""
    try:
        first, *rest = shlex.split(text)
    except ValueError:
        return ""
    if not rest:
        return ""
    kind, words = "command", [first, *rest]
    if is_python(PurePath(first).name):
        module, given = split_module(rest)
        if module:
            kind, words = "module", [module, *given]
        else:
            files = [*dropwhile(lambda word: word.startswith("-"), rest)]
            kind, words = ("script", files) if files else (kind, words)
    elif first.endswith(".py"):
        kind = "script"
    named = json.dumps(shlex.join(words)) if kind == "command" else words[0]
    args = words[1:] if kind != "command" else []
    shown = f", args: {json.dumps(shlex.join(args))}" if args else ""
    return f"; write program: {{{kind}: {named}{shown}}}"

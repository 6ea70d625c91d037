"""What this version cannot do yet is refused, and the documents say the same."""

from __future__ import annotations

import typing

import pytest

from tests.jobs.conf.test_check import find_problems
from vjob.containers.registry import RUNTIMES
from vjob.jobs.conf.document import render_conf_doc, render_init
from vjob.jobs.conf.parse import get_hints
from vjob.jobs.conf.schema import FUNCTION, Container, ProgramKind


@pytest.mark.parametrize(
    "kind", [kind for kind in typing.get_args(ProgramKind) if kind != FUNCTION]
)
def test_every_kind_of_program_is_started_and_described(kind: str) -> None:
    program = kind if kind.startswith("pretrain_") else f"{{{kind}: t}}"
    problems = find_problems(
        "model: gpt2-small\ndata: {synthetic: true}\n", head=f"name: run\nprogram: {program}\n"
    )
    assert problems == []
    section = render_conf_doc().partition("## program")[2].partition("\n## ")[0]
    spellings = (f"program: {kind}", f"so is {kind}", f"{{{kind}: ", f"| `{kind}` |")
    lines = [line for line in section.splitlines() if any(text in line for text in spellings)]
    assert lines and not any("not in this version" in line for line in lines)
    assert any(kind in line for line in render_init().splitlines())


RUNTIME_NAMES = typing.get_args(typing.get_args(get_hints(Container)["runtime"])[0])


@pytest.mark.parametrize("runtime", RUNTIME_NAMES)
def test_a_runtime_that_this_version_lacks_is_refused_with_those_it_has(runtime: str) -> None:
    problems = find_problems(f"container: {{image: x, runtime: {runtime}}}\n")
    has = f"is not supported by this version of vjob; use {', '.join(RUNTIMES)} or none"
    lacks = [f"c:3: container.runtime = {runtime}: {has}"]
    assert problems == ([] if runtime in ("auto", "none", *RUNTIMES) else lacks)

"""No code reads one of our own sentences to decide anything: sentences are rendered last.

Two heuristics over the syntax trees. The first finds comparisons with, searches in, and cuts of an
attribute that holds such a sentence, or of an error's text. The second finds words that code
searches for and that our own code writes, whatever variable holds the text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from tests import ROOT

FOLDERS = ("jobs", "reports", "shelf", "varuna_core", "vjob", "containers")
SENTENCES = {"message", "reason", "advice", "sentence", "remedy", "kept", "facts", "remarks"}
CUTS = {"startswith", "endswith", "replace", "split", "rsplit", "partition", "rpartition", "find"}
CUTS |= {"index", "removeprefix", "removesuffix", "count", "rfind"}
TYPED = {"kind", "rule", "word"}
"""Attributes that hold names with spaces in them, and no sentences."""
MAY_READ = "varuna_core/facts/legacy.py"
"""Reads run folders of before, in which sentences are all there is."""
PROGRAMS = {
    "jobs/monitor/log_lines/stream.py: rank ": "a label: that of the ranks is not repeated",
    "jobs/monitor/rules/words.py: late warm-up": "a state of a start, from the rule",
    "jobs/programs/launchers.py: uv run": "words of a command line",
    "jobs/programs/launchers.py: coverage run": "words of a command line",
    "reports/load/trace_reader.py: sum ": "the name of an action in a trace",
    "reports/load/training_log.py: (after ": "a line of Megatron's",
    "shelf/commands/cli.py: Error: ": "click's word before its message",
    "shelf/commands/completing.py:     return 0\n": "click's script of completion",
    "shelf/importers/bash/passes.py: no jail": "a state that the jail writes",
    "shelf/importers/compare.py: exec ": "a command of a shell",
    "shelf/importers/program.py: export ": "a command of a shell",
    "shelf/importers/translate.py: No such file or directory": "bash's message",
    "shelf/trial/judgement.py: sbatch: ": "sbatch's own name in its message",
    "varuna_core/agent/track/points.py: memory (MB)": "a line of Megatron's",
    "varuna_core/records/logs/progress.py: samples per second": "a line of Megatron's",
    "varuna_core/records/logs/progress.py:  loss at ": "a line of Megatron's",
    "varuna_core/records/logs/rank_output.py: attempt ": "the batch script's lines by attempt",
    "varuna_core/records/logs/training_log.py: lm loss": "a line of Megatron's",
    "varuna_core/records/logs/training_log.py:  value:": "a line of Megatron's",
    "varuna_core/runtime/comm/channel.py: imed out": "gloo's error",
    "varuna_core/schedule/verify.py: both gradients": "a state of the verifier",
}
"""Words of other programs, and names, that our code also writes; by file, with what they are."""


@cache
def parse_sources() -> Mapping[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(one.is_symlink() for one in (path, *path.parents))
    }


def test_nothing_decides_by_a_sentence() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in parse_sources().items()
        if name != MAY_READ
        for node in list_readers(tree)
    ]
    assert found == [], "decide by a type, and render the sentence last"


def test_nothing_searches_for_words_that_we_write() -> None:
    trees = parse_sources()
    read = [(name, *one) for name, tree in trees.items() for one in list_searched(tree)]
    searched = {id(node) for _, _, node in read}
    written = "\0".join(
        node.value
        for tree in trees.values()
        for node in list_texts(tree)
        if id(node) not in searched
    )
    found = {f"{name}: {text}" for name, text, _ in read if name != MAY_READ and text in written}
    assert found - PROGRAMS.keys() == set(), "decide by a type, and render the sentence last"
    assert PROGRAMS.keys() - found == set(), "take it off the list"


def list_readers(tree: ast.AST) -> Iterator[ast.Compare | ast.Call]:
    """Comparisons and calls that read a sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and is_of_texts(node):
            if any(map(is_sentence, (node.left, *node.comparators))):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            is_search = isinstance(owner, ast.Name) and owner.id == "re"
            is_cut = name in CUTS and bool(node.args) and is_sentence(owner)
            if is_cut or (is_search and any(map(is_sentence, node.args))):
                yield node


def is_of_texts(node: ast.Compare) -> bool:
    return all(isinstance(one, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for one in node.ops)


def is_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in SENTENCES


def list_searched(tree: ast.AST) -> Iterator[tuple[str, ast.Constant]]:
    """Words with a space in them that a comparison or a cut looks for."""
    for node in ast.walk(tree):
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare) and is_of_texts(node):
            sides = [node.left, *node.comparators]
            if any(isinstance(one, ast.Attribute) and one.attr in TYPED for one in sides):
                continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides = node.args[:1] if node.func.attr in CUTS else []
        for side in sides:
            for text in list_literals(side):
                if " " in text.value and re.search("[a-z]{2}", text.value):
                    yield text.value, text


def list_literals(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    elif isinstance(node, (ast.JoinedStr, ast.Tuple, ast.List, ast.Set)):
        for one in getattr(node, "values", None) or getattr(node, "elts", ()):
            yield from list_literals(one)


def list_texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """Literals that are no docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('x.message == "no"', True),
        ('"no" in x.reason', True),
        ('x.advice.startswith("no")', True),
        ('re.search("no", x.message)', True),
        ("x.message", False),
        ("x.message is None", False),
    ],
)
def test_readers_are_found(source: str, is_found: bool) -> None:
    assert bool(list(list_readers(ast.parse(source)))) == is_found


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('said.startswith("did you")', ["did you"]),
        ('" left " in kept', [" left "]),
        ('name.removeprefix(f"{x} is ")', [" is "]),
        ('word in ("not known", "no")', ["not known"]),
        ('line.kind == "disk full"', []),
        ('print("did you")', []),
    ],
)
def test_searches_are_found(source: str, words: list[str]) -> None:
    assert [text for text, _ in list_searched(ast.parse(source))] == words

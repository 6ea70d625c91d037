"""No code reads one of our own sentences to decide anything: sentences are rendered last.

A heuristic over the syntax trees: comparisons with, searches in, and cuts of an attribute that
holds such a sentence. A local variable with the same text escapes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import ROOT

FOLDERS = ("jobs", "reports", "shelf", "varuna_core", "vjob")
SENTENCES = {"message", "reason", "advice"}
CUTS = {"startswith", "endswith", "replace", "split", "rsplit", "partition", "rpartition", "find"}
CUTS |= {"index", "removeprefix", "removesuffix"}
MAY_READ = {"varuna_core/facts/legacy.py"}
"""Reads run folders of before, in which sentences are all there is."""
STILL = {
    "varuna_core/agent/gpu/sampler.py:_read_gpus",
    "varuna_core/morph/manager.py:_find_full",
}
"""Functions that still do so, most of them to say nothing twice or to fold lines; this list only
shrinks."""


def test_nothing_decides_by_a_sentence() -> None:
    found = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            is_link = any(one.is_symlink() for one in (path, *path.parents))
            if not is_link and name not in MAY_READ:
                tree = ast.parse(path.read_text())
                found |= {f"{name}:{where}" for where in list_readers(tree)}
    assert found - STILL == set(), "decide by a type, and render the sentence last"
    assert STILL - found == set(), "take it off the list"


def list_readers(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Names of the functions that read a sentence."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        name = node.name if is_function else inside  # type: ignore[attr-defined]
        if reads_sentence(node):
            yield name
        yield from list_readers(node, name)


def reads_sentence(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        plain = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
        are_texts = all(isinstance(one, plain) for one in node.ops)
        return are_texts and any(map(is_sentence, (node.left, *node.comparators)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, name = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id == "re":
            return any(map(is_sentence, node.args))
        return is_sentence(owner) and name in CUTS
    return False


def is_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in SENTENCES


def test_readers_are_found() -> None:
    source = """
def a(x): return x.message == "no"
def b(x): return "no" in x.reason
def c(x): return x.advice.startswith("no")
def d(x): return re.search("no", x.message)
def e(x): return x.message
def f(x): return x.message is None
"""
    assert list(list_readers(ast.parse(source))) == ["a", "b", "c", "d"]

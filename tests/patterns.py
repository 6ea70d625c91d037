"""Regular expressions of the packages, and texts on which a careless one takes for ever.

`collect` finds them two ways: literals given to `re` in the source, and what is compiled while all
modules are imported. `build_texts` makes, for each repetition in a pattern, texts that repeat what
it repeats, what stands before it, and both: a search that begins again at each of them, or that
goes back over them, takes quadratic time there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests import ROOT

ROOMS = ("shelf", "jobs", "varuna_core", "reports", "containers")
CALLS = ("compile", "match", "search", "fullmatch", "findall", "finditer", "sub", "subn", "split")
END = "\x00"


@dataclass(frozen=True, order=True)
class Found:
    """One pattern of the source."""

    text: str
    flags: int


def collect() -> dict[Found, set[str]]:
    """Patterns and the methods that they are used with; `compile` where that is not known."""
    trees = {
        path: ast.parse(path.read_bytes())
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    found: dict[Found, set[str]] = {}
    used: dict[tuple[str, str], set[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for one, method in _read_literal(node):
                    found.setdefault(one, set()).add(method)
            if not isinstance(node, ast.Attribute) or node.attr not in CALLS:
                continue
            owner = node.value  # NAME.match(...), or module.NAME.match(...)
            if isinstance(owner, ast.Name):
                used.setdefault((path.stem, owner.id), set()).add(node.attr)
            elif isinstance(owner, ast.Attribute):
                stem = getattr(owner.value, "id", "")
                used.setdefault((stem, owner.attr), set()).add(node.attr)
    command = [sys.executable, "-m", "tests.patterns"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for text, flags, stem, name in json.loads(done.stdout.splitlines()[-1]):
        methods = used.get((stem, name), set())
        found.setdefault(Found(text, flags), set()).update(methods or {"compile"})
    return {one: methods - {"compile"} or {"compile"} for one, methods in sorted(found.items())}


def _read_literal(call: ast.Call) -> Iterator[tuple[Found, str]]:
    """The pattern of `re.<method>("...")`."""
    owner = call.func
    if not isinstance(owner, ast.Attribute) or owner.attr not in CALLS or not call.args:
        return
    first = call.args[0]
    if getattr(owner.value, "id", "") != "re" or not isinstance(first, ast.Constant):
        return
    text = first.value.decode("latin-1") if isinstance(first.value, bytes) else str(first.value)
    flags = 0
    for given in (*call.args[1:], *(word.value for word in call.keywords)):
        for node in ast.walk(given):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "re":
                flags |= int(getattr(re, node.attr))
    yield Found(text, flags), owner.attr


def list_compiled() -> list[tuple[str, int, str, str]]:
    """Pattern, flags, module and name of all patterns that are made while modules are imported."""
    noted: dict[int, tuple[re.Pattern[Any], str]] = {}
    compile_plain = re.compile

    def note(pattern: Any, flags: Any = 0) -> Any:
        made = compile_plain(pattern, flags)
        module = str(sys._getframe(1).f_globals.get("__name__", ""))
        if module.startswith(("vjob.", "varuna_core.")):
            noted[id(made)] = made, module.rpartition(".")[2]
        return made

    re.compile = note  # type: ignore[assignment]
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name == "__main__.py" or b"re.compile(" not in path.read_bytes():
                continue
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            with contextlib.suppress(Exception):  # what needs a package that is not here
                importlib.import_module(dotted if room == "varuna_core" else f"vjob.{dotted}")
    names: dict[int, list[tuple[str, str]]] = {}
    for dotted, module in list(sys.modules.items()):
        if dotted.startswith(("vjob.", "varuna_core.")):
            for name, value in vars(module).items():
                names.setdefault(id(value), []).append((dotted.rpartition(".")[2], name))
    made = []
    for key, (pattern, stem) in noted.items():
        given = pattern.pattern
        text = given.decode("latin-1") if isinstance(given, bytes) else str(given)
        flags = pattern.flags & ~int(re.UNICODE)
        made += [(text, flags, *place) for place in names.get(key, [(stem, "")])]
    return sorted(made)


# Texts.

try:
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser  # type: ignore[attr-defined]
except ImportError:
    import sre_constants as sre
    import sre_parse as _parser

REPEATS = tuple(
    getattr(sre, name) for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
    if hasattr(sre, name)
)  # fmt: skip
PROBES = [
    chr(code) for code in (*range(97, 123), *range(48, 58), *range(33, 48), 32, 9, 64, 95, 92)
]
PROBES += [chr(code) for code in range(1, 256)]


def sample(items: Any, groups: dict[int, str]) -> str:
    """A short text that these nodes match, as far as looks ahead and back allow."""
    made = ""
    for op, given in items:
        if op is sre.LITERAL:
            made += chr(given)
        elif op is sre.NOT_LITERAL:
            made += "a" if given != ord("a") else "b"
        elif op is sre.ANY:
            made += "a"
        elif op is sre.IN:
            made += pick(_spell(given))
        elif op is sre.BRANCH:
            made += sample(given[1][0], groups)
        elif op is sre.SUBPATTERN:
            text = sample(given[3], groups)
            if given[0] is not None:
                groups[given[0]] = text
            made += text
        elif op in REPEATS:
            made += sample(given[2], groups) * max(given[0], 0)
        elif op is sre.GROUPREF:
            made += groups.get(given, "")
        elif getattr(sre, "ATOMIC_GROUP", None) is op:
            made += sample(given, groups)
    return made


@cache
def pick(spelled: str) -> str:
    """A character that this set has."""
    compiled = re.compile(spelled, re.DOTALL)
    return next(filter(compiled.fullmatch, PROBES), "a")


def _spell(given: Any) -> str:
    made = ""
    for op, value in given:
        if op is sre.NEGATE:
            made = "^" + made
        elif op is sre.LITERAL:
            made += re.escape(chr(value))
        elif op is sre.RANGE:
            made += re.escape(chr(value[0])) + "-" + re.escape(chr(value[1]))
        elif op is sre.CATEGORY:
            name = str(value).lower()
            letter = "d" if "digit" in name else "s" if "space" in name else "w"
            made += "\\" + (letter.upper() if "not" in name else letter)
    return f"[{made}]"


def list_repeats(items: Any, before: str) -> Iterator[tuple[str, str]]:
    """Of each repetition without a small bound: what stands before it, and what it repeats."""
    groups: dict[int, str] = {}
    for op, given in items:
        if op in REPEATS and given[1] >= 100:
            yield before, sample(given[2], groups)
        inner: Sequence[Any] = ()
        if op is sre.SUBPATTERN:
            inner = (given[3],)
        elif op is sre.BRANCH:
            inner = given[1]
        elif op in REPEATS:
            inner = (given[2],)
        elif getattr(sre, "ATOMIC_GROUP", None) is op:
            inner = (given,)
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            inner = (given[1],)
        for one in inner:
            yield from list_repeats(one, before)
        before += sample([(op, given)], groups)


def build_texts(pattern: str, size: int, flags: int = 0) -> list[str]:
    parsed = _parser.parse(pattern, flags)
    units: dict[tuple[str, str], None] = {}
    for before, repeated in list_repeats(parsed, ""):
        units[before, repeated or "a"] = None
        units["", before + (repeated or "a")] = None
        if before:
            units["", before] = None
        units["", (repeated or "a") + before] = None
    units["", sample(parsed, {}) or "a"] = None
    return [before + unit * (size // len(unit)) + END for before, unit in units]


STEPS = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
"""Lengths that are tried in turn: a match cannot be interrupted, so a long text comes last."""
GROWTH = 8
"""Times as long for four times the text: 4 is linear, 16 quadratic."""


def find_slow(found: dict[Found, set[str]], size: int, limit_s: float) -> dict[str, str]:
    """Patterns that take a processor for longer than this, for a text of at most this size, and for
    which that time grows faster than the text; with the beginning of that text."""
    slow = {}
    for one, methods in found.items():
        calls = list_calls(re.compile(one.text, one.flags), methods)
        for step in [*(step for step in STEPS if step < size), size]:
            texts, shorter = (build_texts(one.text, size, one.flags) for size in (step, step // 4))
            pairs = zip(texts, shorter, strict=True)
            example = next(
                (p[0][:60] for p in pairs if any(is_slow(c, *p, limit_s) for c in calls)), ""
            )
            if example:
                slow[one.text] = f"{step} characters like {example!r}"
                break
    return slow


def list_calls(compiled: re.Pattern[str], methods: set[str]) -> list[Callable[[str], Any]]:
    calls: list[Callable[[str], Any]] = []
    if methods & {"match", "fullmatch"}:
        calls += [compiled.match, compiled.fullmatch]
    if methods - {"match", "fullmatch"}:
        calls.append(lambda given: sum(1 for _ in compiled.finditer(given)))
    return calls


def is_slow(call: Callable[[str], Any], given: str, shorter: str, limit_s: float) -> bool:
    """Measure again, and more often, what seems slow: a busy processor makes all times longer, by
    less for a short text than for a long one."""
    if measure(call, given, 1) <= limit_s:
        return False
    return all(measure(call, given, n) > GROWTH * measure(call, shorter, n) for n in (3, 20))


def measure(call: Callable[[str], Any], given: str, times: int) -> float:
    """The least of so many: others' work on the same processor makes some of them longer."""

    def once() -> float:
        begin = time.thread_time()
        call(given)
        return time.thread_time() - begin

    return min(once() for _ in range(times))


if __name__ == "__main__":
    print(json.dumps(list_compiled()))

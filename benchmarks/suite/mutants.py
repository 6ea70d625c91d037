"""Do the tests notice a changed line? Mutants of the code that must not be wrong.

    python -m benchmarks.suite.mutants [--count 200] [--seed 1] [--write]

A mutant is the code with one small change: another comparison, operator, constant or condition. It
is drawn evenly from all that can be changed in the modules below. coverage.py says which tests run
the changed line; these run, in a copy of the checkout, until one fails. A mutant that runs longer
than its limit is caught too. Those that survive are listed with their line, to be read: a change
that no program can notice is equivalent, and stands in EQUIVALENT with its reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks import RESULTS, ROOT

RESULT = RESULTS / "mutants.md"
MODULES = (
    "varuna_core/schedule",
    "varuna_core/planner/search/partition.py",
    "varuna_core/records",
    "varuna_core/morph/machine.py",
    "jobs/conf",
)
TESTS = (
    "tests/varuna_core/schedule",
    "tests/varuna_core/planner/test_partition.py",
    "tests/varuna_core/records",
    "tests/varuna_core/morph/test_machine.py",
    "tests/varuna_core/morph/test_machine_model.py",
    "tests/jobs/conf",
)
BOUND = 0.9
LIMIT_S = 300.0
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
EQUIVALENT: dict[str, str] = {}
"""The mutant as the page writes it: why nobody can notice it."""


@dataclass(frozen=True)
class Mutant:
    file: str
    """Relative to the checkout."""
    line: int
    change: str
    """What stood there, and what stands there now."""
    text: str
    """The whole module."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


# The changes.


def list_changes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each node that can be changed, with what takes its place."""
    skipped = set(_list_skipped(tree))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Compare):
            for index, operator in enumerate(node.ops):
                if other := COMPARISONS.get(type(operator)):
                    changed = copy.deepcopy(node)
                    changed.ops[index] = other()
                    yield node, changed
        elif isinstance(node, ast.BinOp) and (new := OPERATORS.get(type(node.op))):
            changed_operation = copy.deepcopy(node)
            changed_operation.op = new()
            yield node, changed_operation
        elif isinstance(node, ast.BoolOp):
            changed_bool = copy.deepcopy(node)
            changed_bool.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, changed_bool
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, node.operand
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            changed_test = copy.deepcopy(node)
            changed_test.test = ast.UnaryOp(op=ast.Not(), operand=changed_test.test)
            yield node, changed_test
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield node, ast.Constant(value=not node.value)
            elif isinstance(node.value, int):
                yield node, ast.Constant(value=node.value + 1)
        elif isinstance(node, (ast.Break, ast.Continue)):
            yield node, ast.Pass()
        elif isinstance(node, ast.Return) and not _is_none(node.value):
            yield node, ast.Return(value=ast.Constant(value=None))


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _list_skipped(tree: ast.Module) -> Iterator[ast.AST]:
    """What no program asks: annotations, TYPE_CHECKING, slots of a dataclass, messages."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            parts = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [*node.decorator_list, node.returns]
        elif isinstance(node, ast.ClassDef):
            parts = [*node.decorator_list]
        elif isinstance(node, ast.Assert) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            parts = [node]
        for part in parts:
            if part is not None:
                yield from ast.walk(part)


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    files = [
        file for name in MODULES for file in (sorted((ROOT / name).rglob("*.py")) or [ROOT / name])
    ]
    places: list[tuple[Path, int]] = []
    for file in files:
        changes = list(list_changes(ast.parse(file.read_text())))
        places += [(file, index) for index in range(len(changes))]
    drawn = random.Random(seed).sample(places, min(count, len(places)))
    return [make_mutant(file, index) for file, index in drawn]


def make_mutant(file: Path, index: int) -> Mutant:
    """The change is written into the text itself, so that lines keep their numbers."""
    text = file.read_text()
    old, new = list(list_changes(ast.parse(text)))[index]
    if isinstance(old, (ast.If, ast.While)) and isinstance(new, (ast.If, ast.While)):
        old, new = old.test, new.test
    before, after = ast.get_source_segment(text, old), ast.unparse(new)
    assert before is not None and isinstance(old, (ast.expr, ast.stmt))
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: old.lineno - 1])) + old.col_offset
    data = text.encode()
    if isinstance(old, ast.expr):
        after = f"({after})"
    changed = data[:begin] + after.encode() + data[begin + len(before.encode()) :]
    short = [" ".join(part.split())[:70] for part in (before, after)]
    return Mutant(
        str(file.relative_to(ROOT)), old.lineno, f"`{short[0]}` -> `{short[1]}`", changed.decode()
    )


# Which tests run a line, and whether they notice.


def find_tests(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Of each file: the tests that run a line, by coverage's contexts."""
    settings = folder / "coverage.ini"
    settings.write_text(
        f"[run]\ndata_file = {folder / 'coverage'}\ndynamic_context = test_function\n"
        f"source = {','.join(str(ROOT / top) for top in ('varuna_core', 'jobs'))}\n"
    )
    command = [
        sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q",
        "-p", "no:cacheprovider", "-m", "not slow and not long and not slurm", *TESTS,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=make_environment(ROOT), check=False)
    if done.returncode:
        raise SystemExit("the tests fail without any mutant")
    from coverage import CoverageData

    data = CoverageData(str(folder / "coverage"))
    data.read()
    return {
        str(Path(file).relative_to(ROOT)): {
            line: [name for name in contexts if name]
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }


def as_node_id(context: str) -> str | None:
    """tests.room.test_file.test_name, or with the class of a state machine before the name; None
    for what only has a name like a test's."""
    parts = context.split(".")
    ends = [n for n in range(1, len(parts)) if (ROOT / f"{'/'.join(parts[:n])}.py").exists()]
    if not ends or parts[0] != "tests":
        return None
    file, rest = f"{'/'.join(parts[: ends[0]])}.py", parts[ends[0] :]
    return f"{file}::{rest[0]}" if len(rest) == 1 else file


def find_nodes(contexts: Sequence[str]) -> list[str]:
    return sorted({node for name in contexts if (node := as_node_id(name))})


def make_environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run_mutant(mutant: Mutant, folder: Path, tests: list[str]) -> str:
    """`caught`, `time`, `survived`, or `no test` runs its line."""
    if not tests:
        return "no test"
    file = folder / mutant.file
    plain = file.read_text()
    file.write_text(mutant.text)
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header",
        "-m", "not slow and not long and not slurm", *tests,
    ]  # fmt: skip
    child = subprocess.Popen(
        command, cwd=folder, env=make_environment(folder), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.communicate()
        return "time"
    finally:
        file.write_text(plain)
    return "caught" if child.returncode else "survived"


def copy_checkout(target: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode().split("\0")  # fmt: skip
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    began = time.monotonic()
    mutants = draw_mutants(options.count, options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_line = find_tests(folder)
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copy_checkout(folder / str(number))
            copies.put(folder / str(number))

        def try_mutant(mutant: Mutant) -> str:
            contexts = by_line.get(mutant.file, {}).get(mutant.line, [])
            place = copies.get()
            try:
                said = run_mutant(mutant, place, find_nodes(contexts))
            finally:
                copies.put(place)
            print(f"{said:9}{mutant}", flush=True)
            return said

        with ThreadPoolExecutor(options.jobs) as pool:
            found = dict(zip(map(str, mutants), pool.map(try_mutant, mutants), strict=False))
    report(mutants, found, time.monotonic() - began, options)


def report(
    mutants: list[Mutant], found: dict[str, str], took_s: float, options: argparse.Namespace
) -> None:
    alive = [m for m in mutants if found[str(m)] in ("survived", "no test")]
    equal = [m for m in alive if str(m) in EQUIVALENT]
    real = len(mutants) - len(equal)
    share = (len(mutants) - len(alive)) / max(1, real)
    rooms = Counter(next(room for room in MODULES if m.file.startswith(room)) for m in mutants)
    lost = Counter(next(room for room in MODULES if m.file.startswith(room))
                   for m in alive if m not in equal)  # fmt: skip
    rows = "\n".join(f"| {room} | {rooms[room]} | {lost[room]} |" for room in MODULES)
    counts = Counter(found.values())
    text = (
        f"{len(mutants)} mutants, seed {options.seed}, {took_s / 60:.0f} minutes: "
        f"{counts['caught']} failed a test, {counts['time']} ran out of time, "
        f"{counts['survived']} passed all, {counts['no test']} lie on lines that none of "
        f"these tests run. {len(equal)} are "
        f"equivalent. Caught of the others: **{share:.1%}** (bound {BOUND:.0%}).\n\n"
        f"| modules | mutants | not caught |\n|---|---|---|\n{rows}\n\n"
        "Not caught:\n\n"
        + "\n".join(f"- {m} ({found[str(m)]})" for m in alive if m not in equal)
        + "\n\nEquivalent:\n\n"
        + "\n".join(f"- {m}: {EQUIVALENT[str(m)]}" for m in equal)
    )
    print(text)
    print(json.dumps({"share": share}))
    if options.write:
        RESULT.write_text(
            "# Mutants: one small change, and whether a test fails\n\nMade by `python -m "
            f"benchmarks.suite.mutants --count {options.count} --seed {options.seed} --write`. "
            f"{text}\n"
        )


if __name__ == "__main__":
    main()

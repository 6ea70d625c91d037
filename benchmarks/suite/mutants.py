"""Do the tests notice a changed line? Mutants of the code that must not be wrong.

    python -m benchmarks.suite.mutants [--count 200] [--seed 1] [--again] [--write]

A mutant is the code with one small change: another comparison, operator, constant or condition. It
is drawn evenly from all that can be changed in the modules below; the draw depends on the seed and
the changed code alone, so that a sample stays the same while other lines change. coverage.py says
which tests run the changed line; these run, in a copy of the checkout, until one fails. A mutant
that runs longer than its limit is caught too. Those that survive are listed with their line, to be
read: a change that no program can notice is equivalent, and stands in EQUIVALENT with its reason.

What was measured and found is kept (`--keep`), and an interrupted run goes on from there; `--again`
runs once more what was not caught. Lines that only processes of their own run count as run by no
test, and a test that fails or takes too long under coverage.py is left out: the share is a lower
bound.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks import RESULTS, ROOT

RESULT = RESULTS / "mutants.md"
PASSES = RESULTS / "mutants.json"
"""Seed, drawn, equivalent, not caught, share and note of each pass that was written."""
MODULES = (
    "varuna_core/schedule",
    "varuna_core/planner/search/partition.py",
    "varuna_core/records",
    "varuna_core/morph/machine.py",
    "jobs/conf",
)
TESTS = (
    "tests/varuna_core/schedule",
    "tests/varuna_core/records",
    "tests/jobs/conf",
)
"""The rooms of the modules. coverage.py says which of their tests run a line."""
SUBMITS = ("tests/jobs/submit/test_fates.py", "tests/jobs/submit/test_build_plan.py")
READERS = ("tests/jobs/monitor/readers/test_times_of_writing.py", "tests/reports/load/test_logs.py")
ALSO: dict[str, tuple[str, ...]] = {
    "jobs/conf/schema.py": ("tests/test_docs.py",),
    "jobs/conf/document.py": ("tests/test_docs.py",),
    "jobs/conf/redact.py": ("tests/jobs/conf/test_redact.py",),
    "jobs/conf/": ("tests/jobs/conf/test_write.py", *SUBMITS, "tests/jobs/submit/test_sweep.py"),
    "jobs/conf/loading/": ("tests/jobs/programs/test_training.py",),
    "varuna_core/morph/machine.py": (
        "tests/varuna_core/morph/test_machine.py",
        "tests/varuna_core/morph/test_machine_model.py",
    ),
    "varuna_core/planner/search/partition.py": ("tests/varuna_core/planner/test_partition.py",),
    "varuna_core/records/checkpoints.py": ("tests/jobs/monitor/rules/test_failing.py",),
    "varuna_core/records/exits.py": ("tests/jobs/runs/test_outcome.py",),
    "varuna_core/records/formatting.py": (
        "tests/jobs/monitor/model/test_text.py",
        "tests/reports/export/test_tables.py",
    ),
    "varuna_core/records/rank_map.py": (
        "tests/varuna_core/morph/test_layout.py",
        "tests/jobs/planning/test_script_layouts.py",
        "tests/jobs/submit/test_build_plan.py",
    ),
    "varuna_core/records/logs/literals.py": ("tests/jobs/monitor/log_lines/test_errors.py",),
    "varuna_core/records/logs/t": (*READERS, "tests/varuna_core/agent/test_log_limit.py"),
    "varuna_core/records/logs/trace.py": (
        "tests/varuna_core/trace/test_spans.py",
        "tests/varuna_core/runtime/test_step_trace.py",
    ),
    "varuna_core/records/morphing.py": (
        "tests/varuna_core/morph/test_machine.py",
        "tests/varuna_core/morph/test_joins.py",
        "tests/jobs/elastic/test_membership.py",
    ),
    "varuna_core/records/plan.py": SUBMITS,
    "varuna_core/records/runfolder.py": (
        "tests/varuna_core/functions/test_environment.py",
        "tests/shelf/test_prune.py",
        "tests/jobs/runs/test_listing.py",
    ),
    "varuna_core/schedule/": (
        "tests/varuna_core/planner/test_compiled.py",
        "tests/varuna_core/runtime/engine/test_plans.py",
    ),
}
"""Files of tests in other rooms that run whole where those let a mutant pass."""
PYTEST = (
    *("-q", "--no-header", "-p", "no:cacheprovider", "-p", "benchmarks.suite.chosen"),
    # The server that forks has imported them.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
    *("-m", "not long and not slow and not slurm and not browser"),
)
FAILED = ("1", "2")
"""Pytest's exit codes where a test fails, or a file of tests cannot be imported."""
NOTHING_RAN = "5"
"""Where it finds none of the tests."""
CAUGHT = ("caught", "time")
TEST_S = 60.0
"""A test that takes longer under coverage.py is left out."""
ROOM_S = 600.0
"""No further test of a room starts under coverage.py after this."""
QUICKEST = 300
START_S = 40.0
"""For the start of pytest, beside five times what the tests took."""
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
EQUIVALENT: dict[str, str] = {
    "varuna_core/schedule/order.py, compute_capacity: `high > 4 * schedule.num_stages * "
    "schedule.num_microbatches` -> `not high > 4 * schedule.num_stages * "
    "schedule.num_microbatches`": (
        "a schedule that no room helps is refused at the first doubling, in the same words"
    ),
    "varuna_core/records/logs/tail.py, Follower._is_in_place: `return False` -> `return None`": (
        "its one caller asks whether it is true"
    ),
}
"""The mutant as the page writes it: why nobody can notice it."""


@dataclass(frozen=True)
class Mutant:
    file: str
    """Relative to the checkout."""
    line: int
    lines: range
    """Of the statement; of a block its first lines."""
    key: str
    """File, function and change; the same wherever in the file the function stands."""
    old: ast.AST
    new: ast.AST

    def __str__(self) -> str:
        return f"{self.key} (line {self.line})"

    def render(self) -> str:
        """The whole module. The change is written into the text, so that lines keep their
        numbers."""
        text = (ROOT / self.file).read_text()
        data = text.encode()
        begin, end = find_span(text, self.old)
        after = ast.unparse(self.new)
        after = f"({after})" if isinstance(self.old, ast.expr) else after
        return (data[:begin] + after.encode() + data[end:]).decode()


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


def draw_mutants(count: int, seed: int, modules: tuple[str, ...] = MODULES) -> list[Mutant]:
    def draw(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    return sorted(list_mutants(modules), key=draw)[:count]


@cache
def list_mutants(modules: tuple[str, ...] = MODULES) -> list[Mutant]:
    files = [
        file for name in modules for file in (sorted((ROOT / name).rglob("*.py")) or [ROOT / name])
    ]
    return [mutant for file in files for mutant in list_mutants_of(file)]


def list_mutants_of(file: Path) -> Iterator[Mutant]:
    text = file.read_text()
    tree = ast.parse(text)
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    name = str(file.relative_to(ROOT))
    seen: Counter[str] = Counter()
    for old, new in list_changes(tree):
        outer: list[ast.AST] = [old]
        while outer[-1] in around:
            outer.append(around[outer[-1]])
        statement = next(node for node in outer if isinstance(node, ast.stmt))
        last = statement.end_lineno or statement.lineno
        if body := getattr(statement, "body", None):
            last = max(statement.lineno, body[0].lineno - 1)
        place = ".".join(
            getattr(node, "name", "") for node in reversed(outer[1:]) if is_named(node)
        )
        if isinstance(old, (ast.If, ast.While)) and isinstance(new, (ast.If, ast.While)):
            old, new = old.test, new.test
        begin, end = find_span(text, old)
        parts = (text.encode()[begin:end].decode(), ast.unparse(new))
        before, after = [" ".join(part.split())[:70] for part in parts]
        key = f"{name}, {place or 'the module'}: `{before}` -> `{after}`"
        seen[key] += 1
        if seen[key] > 1:
            key += f", no. {seen[key]}"
        lines = range(statement.lineno, last + 1)
        yield Mutant(name, getattr(old, "lineno", 0), lines, key, old, new)


def is_named(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def find_span(text: str, node: ast.AST) -> tuple[int, int]:
    """Its first byte in the text, and the one after its last."""
    assert isinstance(node, (ast.expr, ast.stmt))
    assert node.end_lineno is not None and node.end_col_offset is not None
    starts = list_starts(text)
    return (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )


@cache
def list_starts(text: str) -> list[int]:
    """The first byte of each line."""
    found = [0]
    for line in text.encode().split(b"\n"):
        found.append(found[-1] + len(line) + 1)
    return found


# Which tests run a line, and whether they notice.


@dataclass(frozen=True)
class Measured:
    """What the tests of all rooms run, and how long they take."""

    seconds: dict[str, float]
    """Of each test that passes."""
    lines: dict[str, dict[int, set[str]]]
    """Of each file of the modules: the tests that run a line; "" where an import runs it."""
    files: dict[str, set[str]]
    """The tests that run anything of a file, of all files."""

    def list_phases(self, mutant: Mutant) -> list[list[str]]:
        """The tests for a mutant, fastest first: those of the file of its name; the others of its
        own room, and of others, that run its lines. What only an import runs is anybody's: then
        the quickest that run anything of its file, or of a file that imports it."""
        by_line = self.lines.get(mutant.file, {})
        running = set().union(*(by_line.get(line, set()) for line in mutant.lines))
        if running == {""}:
            near = [mutant.file, *find_importers(mutant.file)]
            running = set().union(*(self.files.get(file, set()) for file in near))
            running = set(self._sort(running)[:QUICKEST])
        room = find_room(mutant.file)
        here = {name for name in running if name.startswith(room)}
        named = {name for name in here if f"test_{Path(mutant.file).stem}" in name}
        return list(filter(None, map(self._sort, (named, here - named, running - here))))

    def list_others(self, mutant: Mutant) -> list[str]:
        """Files of tests, whole, whose lines were not measured."""
        measured = {name.partition("::")[0] for name in self.seconds}
        found = [file for start in ALSO if mutant.file.startswith(start) for file in ALSO[start]]
        return [file for file in found if file not in measured]

    def _sort(self, names: set[str]) -> list[str]:
        return sorted(names & self.seconds.keys(), key=self.seconds.__getitem__)


@cache
def find_importers(file: str) -> list[str]:
    words = list_import_words(file)
    return [
        str(path.relative_to(ROOT))
        for top in ("varuna_core", "jobs", "shelf")
        for path in sorted((ROOT / top).rglob("*.py"))
        if any(word in path.read_text() for word in words)
    ]


def list_import_words(file: str) -> tuple[str, ...]:
    name = file.removesuffix(".py").replace("/", ".")
    name = name if name.startswith("varuna_core") else f"vjob.{name}"
    package, _, module = name.rpartition(".")
    return f"from {name} import", f"import {name}", f"from {package} import {module}"


def find_room(file: str) -> str:
    """The folder of tests that mirrors a module's."""
    folder = ROOT / "tests" / Path(file).parent
    while not folder.is_dir():
        folder = folder.parent
    return f"{folder.relative_to(ROOT)}/"


def measure(kept: Path) -> Measured:
    """Run the tests of each room under coverage.py, unless they and the code are as they were."""
    from coverage import CoverageData

    found = Measured({}, {}, {})
    code = hash_files("varuna_core", "jobs", "shelf", "templates", "containers", "reports")
    for room in TESTS:
        name = room.removesuffix(".py").replace("/", ".")
        data, passed, state = (kept / f"{name}.{end}" for end in ("coverage", "json", "state"))
        now = f"{code} {hash_files(room)}"
        if not state.exists() or state.read_text() != now:
            run_room(room, data, passed)
            state.write_text(now)
        found.seconds.update(json.loads(passed.read_text()))
        read = CoverageData(str(data))
        read.read()
        for full in read.measured_files():
            file = str(Path(full).relative_to(ROOT))
            by_line = read.contexts_by_lineno(full)
            found.files.setdefault(file, set()).update(*by_line.values())
            if file.startswith(MODULES):
                lines = found.lines.setdefault(file, {})
                for line, contexts in by_line.items():
                    lines.setdefault(line, set()).update(contexts)
    return found


def hash_files(*names: str) -> str:
    listed = run_git("ls-files", "-s", "--", *names) + run_git("diff", "HEAD", "--", *names)
    return hashlib.sha256(listed.encode()).hexdigest()


def run_git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout


def run_room(room: str, data: Path, passed: Path) -> None:
    settings = data.with_suffix(".ini")
    settings.write_text(
        f"[run]\ndata_file = {data}\n"
        f"source = {','.join(str(ROOT / top) for top in ('varuna_core', 'jobs'))}\n"
    )
    data.unlink(missing_ok=True)
    passed.unlink(missing_ok=True)
    began = time.monotonic()
    command = [
        sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest",
        *PYTEST, "--at-most", f"{ROOM_S:.0f}", "--timeout", f"{TEST_S:.0f}",
        "--passed", str(passed), room,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=make_environment(ROOT), check=False, text=True, capture_output=True
    )
    if not passed.exists():
        raise SystemExit(f"{room}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.findall("^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
    print(f"{room}: {time.monotonic() - began:.0f} s; left out: {failed}", flush=True)


def make_environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


class Copy:
    """A checkout of its own, and the process that runs its tests (server.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_checkout(folder)
        self.server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.suite.server"], cwd=folder,
            env=make_environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run_mutant(self, mutant: Mutant, measured: Measured) -> dict[str, str]:
        """`said` is `caught`, `time`, `survived`, or `no test` runs its line; `by` the test."""
        file = self.folder / mutant.file
        plain = file.read_text()
        phases = measured.list_phases(mutant)
        file.write_text(mutant.render())
        try:
            for tests in phases:
                seconds = sum(map(measured.seconds.__getitem__, tests))
                limit_s = min(LIMIT_S, START_S + 5 * seconds)
                if found := self.run_tests(tests, limit_s):
                    return found
            others = measured.list_others(mutant)
            if others and (found := self.run_tests(others, LIMIT_S)):
                return found if found["said"] == "caught" else {**found, "said": "survived"}
        finally:
            file.write_text(plain)
        return {"said": "survived" if phases or others else "no test", "by": ""}

    def run_tests(self, tests: list[str], limit_s: float) -> dict[str, str] | None:
        """Of tests by their ids, or of whole files; None where all pass."""
        chosen = self.folder / "chosen.json"
        chosen.write_text(json.dumps(tests))
        files = sorted({name.partition("::")[0] for name in tests})
        words = ["-x", *PYTEST, *files]
        if "::" in tests[0]:
            words += ["--chosen", str(chosen)]
        answer, text = self.run_pytest(words, limit_s)
        if answer in ("0", NOTHING_RAN):
            return None
        if answer not in (*FAILED, "time"):
            raise RuntimeError(f"pytest ended with {answer}: {text[-3000:]}")
        failed = re.findall("^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
        return {
            "said": "time" if answer == "time" else "caught",
            "by": failed[0] if failed else text[-300:],
        }

    def run_pytest(self, words: list[str], limit_s: float) -> tuple[str, str]:
        """Return its exit code, or `time` where it was ended at the limit, and its output."""
        assert self.server.stdin and self.server.stdout
        output = self.folder / "output.txt"
        self.server.stdin.write(json.dumps([str(output), limit_s, words]) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline().strip()
        return answer, output.read_text(errors="replace")

    def end(self) -> None:
        assert self.server.stdin and self.server.stdout
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()


def copy_checkout(target: Path) -> None:
    """With its links: without those of vjob/ the tests would import the installed vjob."""
    for name in filter(None, run_git("ls-files", "-z").split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)
    # Tests ask git for the files.
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)
    subprocess.run(["git", "add", "-A"], cwd=target, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--again", action="store_true", help="run what was not caught once more")
    parser.add_argument(
        "--keep", type=Path, default=ROOT / "build/mutants", help="resume from here"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--note", default="", help="what the page says of this pass")
    options = parser.parse_args()
    mutants = draw_mutants(options.count, options.seed)
    options.keep.mkdir(parents=True, exist_ok=True)
    measured = measure(options.keep)
    kept = options.keep / "results.jsonl"
    found = read_results(kept, mutants)
    if options.again:
        found = {name: said for name, said in found.items() if said in CAUGHT}
    if todo := [mutant for mutant in mutants if mutant.key not in found]:
        with tempfile.TemporaryDirectory() as name:
            found |= run_mutants(todo, measured, Path(name), kept, options.jobs)
    report(mutants, found, options)


def read_results(kept: Path, mutants: list[Mutant]) -> dict[str, str]:
    """Of earlier runs, where the module is the same."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    rows = {row["mutant"]: row for row in map(json.loads, lines)}
    return {
        mutant.key: rows[mutant.key]["said"]
        for mutant in mutants
        if rows.get(mutant.key, {}).get("text") == hash_text(mutant.render())
    }


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_mutants(
    mutants: list[Mutant], measured: Measured, folder: Path, kept: Path, jobs: int
) -> dict[str, str]:
    copies = [Copy(folder / str(number)) for number in range(jobs)]
    free: SimpleQueue[Copy] = SimpleQueue()
    for place in copies:
        free.put(place)

    def try_mutant(mutant: Mutant) -> dict[str, Any]:
        place = free.get()
        began = time.monotonic()
        try:
            row: dict[str, Any] = {"mutant": mutant.key, "text": hash_text(mutant.render())}
            row |= place.run_mutant(mutant, measured)
        finally:
            free.put(place)
        row["seconds"] = round(time.monotonic() - began, 1)
        print(f"{row['said']:9}{mutant}   [{row['by'][:100]}, {row['seconds']} s]", flush=True)
        return row

    found = {}
    with ThreadPoolExecutor(jobs) as pool, kept.open("a") as file:
        for done in as_completed([pool.submit(try_mutant, mutant) for mutant in mutants]):
            row = done.result()
            file.write(json.dumps(row) + "\n")
            file.flush()
            found[row["mutant"]] = row["said"]
    for place in copies:
        place.end()
    return found


def report(mutants: list[Mutant], found: dict[str, str], options: argparse.Namespace) -> None:
    alive = [m for m in mutants if found[m.key] not in CAUGHT]
    equal = [m for m in alive if m.key in EQUIVALENT]
    lost = [m for m in alive if m not in equal]
    share = 1 - len(lost) / max(1, len(mutants) - len(equal))
    rows = []
    for room in MODULES:
        of_room = [m for m in mutants if m.file.startswith(room)]
        rows.append(
            f"| {room} | {len(of_room)} | {sum(m in equal for m in of_room)} "
            f"| {sum(m in lost for m in of_room)} |"
        )
    text = (
        f"The last of them by module, of {len(list_mutants())} mutants that there are:\n\n"
        "| modules | drawn | equivalent | not caught |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\nNot caught:\n\n"
        + "\n".join(f"- {m} ({found[m.key]})" for m in lost)
        + "\n\nEquivalent, as nothing that a program does shows it:\n\n"
        + "\n".join(f"- {m}: {EQUIVALENT[m.key]}" for m in equal)
        + "\n"
    )
    print(text)
    print(json.dumps({"share": share}))
    known = {mutant.key for mutant in list_mutants()}
    if gone := sorted(EQUIVALENT.keys() - known):
        raise SystemExit(f"EQUIVALENT names what is no longer there: {gone}")
    if options.write:
        row = [options.seed, len(mutants), len(equal), len(lost), share, options.note]
        passes = [*(json.loads(PASSES.read_text()) if PASSES.exists() else []), row]
        PASSES.write_text(json.dumps(passes, indent=1) + "\n")
        RESULT.write_text(render_page(passes, text).rstrip() + "\n")


def render_page(passes: list[list[Any]], text: str) -> str:
    rows = "\n".join(
        f"| {seed} | {drawn} | {equal} | {lost} | {share:.1%} | {note} |"
        for seed, drawn, equal, lost, share, note in passes
    )
    return (
        "# Mutants: one small change, and whether a test fails\n\nMade by `python -m "
        "benchmarks.suite.mutants --count COUNT --seed SEED --write`. The sample depends on the "
        f"seed alone. Caught is of those that are not equivalent (bound {BOUND:.0%}); a mutant on "
        "a line that no test runs counts as not caught.\n\n"
        "| seed | drawn | equivalent | not caught | caught | |\n|---|---|---|---|---|---|\n"
        f"{rows}\n\n{text}"
    )


if __name__ == "__main__":
    main()

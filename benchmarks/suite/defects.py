"""Which defects does each slow test of the runtime find, and which does it alone find?

    python -m benchmarks.suite.processor --keep COSTS TESTS        (the tests of ROOMS)
    python -m benchmarks.suite.defects COSTS [--mutants 40] [--seed 1] [--keep FOLDER] [--write]

The known defects of tests/varuna_core/equality/defects.py are put back one at a time, in a copy of
the checkout whose `varuna_core/varuna.py` ends with the patch: so each process that imports it has
the defect, forked ranks among them. The slow tests in which it acts run then (put_back.py), and the
quick ones of its room, because nothing is lost with a slow test that finds what a quick one finds.
Mutants of MODULES are drawn as benchmarks.suite.mutants draws them; the quick tests of the room run
first, and only what they let pass is held against each slow file, until its first failure.

A file of tests has LIMIT times what it takes without a defect; what did not run by then is counted
as left out. What was found is kept (`--keep`), and an interrupted run goes on from there, as long
as the runtime and the file of tests are the same.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import pytest

from benchmarks import RESULTS, ROOT
from benchmarks.suite.mutants import Copy, Mutant, draw_mutants, find_room, hash_files, list_mutants
from benchmarks.suite.processor import read_rows, sum_files
from benchmarks.suite.put_back import CONTROL, PROBED, find_file

RESULT = RESULTS / "defects.md"
LONG = ("tests/varuna_core/test_varuna", "tests/varuna_core/trace/test_engines")
"""As tests/conftest.py has it."""
ROOMS = ("tests/varuna_core/runtime", *LONG)
"""Starts of the names of the files of tests."""
RUNTIME = "varuna_core/runtime"
MODULES = tuple(
    f"{RUNTIME}/{room}" for room in ("engine", "split", "optim", "comm", "tensor_parallel")
)
PLACES = {
    "attributes": f"{RUNTIME}/split/attributes.py",
    "complex_linear": f"{RUNTIME}/engine/weight_grads.py",
    "computed_attributes": f"{RUNTIME}/split/rehearsal.py",
    "computed_weights": f"{RUNTIME}/engine/weight_grads.py",
    "foreign_streams": f"{RUNTIME}/split/random_streams.py",
    "forked_child": f"{RUNTIME}/comm/links.py",
    "hooked_graphs": f"{RUNTIME}/split/rehearsal.py",
    "hooks_in_half": f"{RUNTIME}/optim/hooks.py",
    "inputs_in_place": f"{RUNTIME}/split/inputs.py",
    "offloaded_nested": f"{RUNTIME}/engine/graph_offload.py",
    "one_optimizer": f"{RUNTIME}/optim/updates.py",
    "repeated_masks": f"{RUNTIME}/tensor_parallel/draws.py",
    "rounded_weights": f"{RUNTIME}/engine/loss_seed.py",
    "row_gradients": f"{RUNTIME}/engine/weight_grads.py",
    "selective_flex": f"{RUNTIME}/split/rehearsal.py",
    "time_limits": f"{RUNTIME}/comm/links.py",
}
"""Of each defect, the module that it is in."""
OWN = ("cast_inputs", "mean_of_means")
"""Defects that change the model of the equality machine itself: no other test can find them."""
PROOF = ("time_limits", "tests/varuna_core/test_varuna_failures.py::test_all_collectives_have_the")
"""A defect, and a test of forked ranks that must find it where it reaches them."""
LIMIT, LEAST_S = 5.0, 90.0
TEST_S = 240
LARGE_S = 100.0
"""Of processor time: a file that takes more ends with its first failure."""
BEHIND = """

import sys as _sys
_sys.path.append({folder!r})
from benchmarks.suite.put_back import enter as _enter
_kept = _enter({name!r}, {folder!r})
"""
"""What the copy's varuna.py ends with."""
PROGRAM = re.compile(r"tests\.ranks\.(\w+)")
QUICK = "quick tests"
VARUNA = "varuna_core/varuna.py"
IN_PYTEST = ("-p", "varuna_core.varuna")
"""The defect is there before any test is imported, whether or not the test needs this module."""
READERS = {"time_limits": ("tests/varuna_core/test_varuna_failures.py",)}
"""Slow files that read what a defect changes, where it acts in all of them: a limit of half an hour
ends no test, as none takes so long."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One change of the code against one file of tests, or against all quick ones."""

    change: str
    file: str
    state: str
    """Hash of the code and the tests."""
    failed: list[str]
    passed: int
    left: int
    """Tests that did not run any more."""


# The plug-in of pytest.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--noted", type=Path)
    parser.addoption("--limits", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    limits_s, once = json.loads(config.getoption("--limits").read_text())
    notes = Notes(config.getoption("--noted"), limits_s, once)
    config.pluginmanager.register(notes)


class Notes:
    """Writes what became of each test, and leaves out the rest of a file that is over."""

    def __init__(self, path: Path, limits_s: dict[str, float], once: list[str]) -> None:
        self.path, self.limits_s, self.once = path, limits_s, once
        self.until: dict[str, float] = {}
        self.said: dict[str, str] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = find_file(item.nodeid)
        until = self.until.setdefault(file, time.monotonic() + self.limits_s[file])
        if time.monotonic() > until or (file in self.once and file in self.failed):
            self.said[item.nodeid] = "left"
            pytest.skip("the rest of this file is left out")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.said[report.nodeid] = "failed"
            self.failed.add(find_file(report.nodeid))
        elif report.when == "call":
            self.said.setdefault(report.nodeid, report.outcome)
        if report.when == "teardown":
            with self.path.open("a") as file:
                print(json.dumps([report.nodeid, self.said.get(report.nodeid)]), file=file)


# Runs.


def find_function(test: str) -> str:
    return test.partition("[")[0]


@cache
def list_files() -> list[str]:
    paths = (ROOT / "tests/varuna_core").rglob("test_*.py")
    return [
        name for name in sorted(str(p.relative_to(ROOT)) for p in paths) if name.startswith(ROOMS)
    ]


def is_slow(file: str) -> bool:
    return file.startswith(LONG) or "pytest.mark.slow" in (ROOT / file).read_text()


@cache
def hash_state(files: tuple[str, ...]) -> str:
    """Of the runtime, the defects, and these files with the programs of ranks that they name."""
    texts = [(ROOT / file).read_text() for file in files if (ROOT / file).is_file()]
    programs = {f"tests/ranks/{name}.py" for text in texts for name in PROGRAM.findall(text)}
    code = ("varuna_core", "tests/varuna_core/equality/defects.py")
    return hash_files(*code, *files, *sorted(programs))[:16]


class Book:
    """What was found, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[str, str], Found] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            row = Found(**json.loads(line))
            self.rows[row.change, row.file] = row

    def find(self, change: str, file: str) -> Found | None:
        files = tuple(list_quick()) if file == QUICK else (file,)
        row = self.rows.get((change, file))
        return row if row and row.state == hash_state(files) else None

    def add(self, change: str, file: str, said: dict[str, str | None]) -> Found:
        counts = [list(said.values()).count(word) for word in ("passed", "left")]
        files = tuple(list_quick()) if file == QUICK else (file,)
        row = Found(
            change=change, file=file, state=hash_state(files), passed=counts[0], left=counts[1],
            failed=[test for test, word in said.items() if word == "failed"],
        )  # fmt: skip
        with self.path.open("a") as written:
            print(json.dumps(asdict(row)), file=written)
        self.rows[change, file] = row
        return row


def list_quick() -> list[str]:
    return [file for file in list_files() if not is_slow(file)]


def list_near(module: str) -> list[str]:
    """The quick files of a module's room."""
    return [file for file in list_quick() if file.startswith(find_room(module))]


def list_slow() -> list[str]:
    return [file for file in list_files() if is_slow(file)]


def pick(said: dict[str, str | None], file: str) -> dict[str, str | None]:
    return {test: word for test, word in said.items() if find_file(test) == file}


class Runs:
    """Tests in the copy of the checkout."""

    def __init__(self, place: Copy, costs: dict[str, float], book: Book) -> None:
        self.place, self.costs, self.book = place, costs, book

    def run(
        self, tests: Sequence[str], *words: str, is_once: bool = False
    ) -> dict[str, str | None]:
        """What became of each test of these files, or of these tests: passed, failed, left, or
        None where nothing was said. With `is_once` each file ends with its first failure."""
        files = list(dict.fromkeys(map(find_file, tests)))
        noted, limits = self.place.folder / "noted.jsonl", self.place.folder / "limits.json"
        noted.write_text("")
        limits_s = {file: max(LEAST_S, LIMIT * self.costs.get(file, 0.0)) for file in files}
        once = [file for file in files if is_once or self.costs.get(file, 0.0) > LARGE_S]
        limits.write_text(json.dumps([limits_s, once]))
        answer, text = self.place.run_pytest(
            [
                "-q", "--no-header", "-p", "no:cacheprovider", "-p", "benchmarks.suite.defects",
                "-W", "ignore::pytest.PytestAssertRewriteWarning",
                "-m", "not long and not gpu", "--timeout", str(TEST_S), "--noted", str(noted),
                "--limits", str(limits), *words, *tests,
            ],
            sum(limits_s.values()),
        )  # fmt: skip
        said = dict(map(json.loads, noted.read_text().splitlines()))
        if not said and answer != "time" and "ERROR tests/" not in text:
            raise RuntimeError(f"pytest ended with {answer}: {text[-3000:]}")
        for file in files:  # one that cannot be imported, or was not reached
            if not any(test.startswith(file) for test in said):
                said[f"{file}::all"] = "failed" if f"ERROR {file}" in text else "left"
        return said

    def run_defect(self, name: str, files: Sequence[str]) -> None:
        files = [file for file in files if self.book.find(name, file) is None]
        if not files:
            return
        began = time.monotonic()
        with Changed(self.place.folder / VARUNA, self.end_with(name)):
            said = self.run(files, *IN_PYTEST)
        rows = [self.book.add(name, file, pick(said, file)) for file in files]
        failed = sum(len(row.failed) for row in rows)
        print(
            f"{name}: {failed} failed of {len(said)} tests in {len(files)} files, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )

    def run_quick(self, change: str, file: str, text: str, files: Sequence[str]) -> Found:
        """Run these quick files until a test fails that passes without the change."""
        left_out: list[str] = []
        words = IN_PYTEST if file == VARUNA else ()
        while True:
            deselected = [word for test in left_out for word in ("--deselect", test)]
            with Changed(self.place.folder / file, text):
                said = self.run(files, "-x", *deselected, *words)
            failed = [test for test, word in said.items() if word == "failed"]
            if not failed or "failed" not in self.run(failed[:1]).values():
                return self.book.add(change, QUICK, said)
            left_out.append(failed[0])

    def run_control(self, files: Sequence[str], kept: Path) -> None:
        """Run without a defect, and keep what the probes noted."""
        self.run_defect(CONTROL, files)
        noted = self.place.folder / PROBED
        if noted.exists():
            with kept.open("a") as file:
                file.write(noted.read_text())

    def end_with(self, name: str) -> str:
        text = (ROOT / VARUNA).read_text()
        return text + BEHIND.format(folder=str(self.place.folder), name=name)

    def run_mutant(self, mutant: Mutant, files: Sequence[str]) -> None:
        began, key = time.monotonic(), mutant.key
        quick = self.book.find(key, QUICK)
        quick = quick or self.run_quick(key, mutant.file, mutant.render(), list_near(mutant.file))
        files = [file for file in files if self.book.find(key, file) is None]
        if files and not quick.failed:
            with Changed(self.place.folder / mutant.file, mutant.render()):
                said = self.run(files, is_once=True)
            for file in files:
                self.book.add(key, file, pick(said, file))
        finders = [r.file for (c, _), r in self.book.rows.items() if c == key and r.failed]
        print(f"{mutant}: {finders}, {time.monotonic() - began:.0f} s", flush=True)


class Changed:
    """A file that has another text for a while."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.kept = path, text, path.read_text()

    def __enter__(self) -> None:
        self.path.write_text(self.text)

    def __exit__(self, *_: object) -> None:
        self.path.write_text(self.kept)


def is_foreign(file: str) -> bool:
    """Other people's engines: no process of these tests imports the runtime."""
    return file.startswith("tests/varuna_core/trace/")


def read_acting(kept: Path) -> dict[str, set[str]]:
    """The slow files in which each defect acts, by the notes of the run without one."""
    acting: dict[str, set[str]] = defaultdict(set)
    for name, file in map(json.loads, kept.read_text().splitlines()):
        acting[name].add(file)
    for name, files in READERS.items():
        acting[name] |= set(files)
    return {name: acting[name] & set(list_slow()) for name in PLACES}


# The page.


@dataclass(frozen=True, kw_only=True)
class Test:
    """A function of a slow file, with all its cases."""

    name: str
    seconds: float
    cases: int
    found: frozenset[str]
    alone: frozenset[str]
    """Of these, the defects that no other function finds, in a slow file or a quick one."""


def list_tests(book: Book, costs: dict[str, float], changes: Sequence[str]) -> list[Test]:
    finders = {
        change: {find_function(t) for tests in list_failed(book, change).values() for t in tests}
        for change in changes
    }
    seconds: dict[str, float] = defaultdict(float)
    cases: dict[str, int] = defaultdict(int)
    for test, cost in costs.items():
        if find_file(test) in list_slow():
            seconds[find_function(test)] += cost
            cases[find_function(test)] += 1
    return [
        Test(
            name=name, seconds=seconds[name], cases=cases[name],
            found=frozenset(c for c in changes if name in finders[c]),
            alone=frozenset(c for c in changes if finders[c] == {name}),
        )
        for name in sorted(seconds, key=lambda name: (find_file(name), -seconds[name]))
    ]  # fmt: skip


def read_purpose(test: str) -> str:
    """The first line of the docstring of a file of tests, or of a test: empty without one."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    found = [ast.get_docstring(node) or "" for node in (nodes if name else [tree])]
    return found[0].partition("\n")[0] if found else ""


def list_failed(book: Book, change: str) -> dict[str, list[str]]:
    """By file, the tests that fail with a change and pass without it."""
    broken = {t for (name, _), row in book.rows.items() if name == CONTROL for t in row.failed}
    rows = [row for (name, _), row in book.rows.items() if name == change]
    return {row.file: [test for test in row.failed if test not in broken] for row in rows}


def list_cells(book: Book, change: str) -> tuple[list[str], list[str], str | None]:
    """The slow files that find a change, those that do not, and the quick test that does."""
    failed = list_failed(book, change)
    quick = failed.pop(QUICK, [])
    finds = [file for file, tests in failed.items() if tests]
    return finds, [file for file in failed if file not in finds], quick[0] if quick else None


def show(name: str) -> str:
    short = name.removeprefix("tests/varuna_core/").replace("|", "\\|")
    return f"`{short}`"


def render_defects(book: Book, acting: dict[str, set[str]]) -> str:
    rows = []
    for name in PLACES:
        finds, others, quick = list_cells(book, name)
        where = [f"finds: {show(file)}" for file in finds]
        where += [f"does not: {show(file)}" for file in others]
        where += [f"not run: {show(file)}" for file in sorted(acting[name] - {*finds, *others})]
        by_quick = show(quick) if quick else "none" if (name, QUICK) in book.rows else "not run"
        rows.append(f"| {name} | {'; '.join(where) or 'acts in none that is known'} | {by_quick} |")
    head = "| defect | slow files in which it acts | quick test of its room |"
    return "\n".join([head, "|---|---|---|", *rows])


def render_tests(tests: Sequence[Test], unknown: Sequence[str], unrun: Collection[str]) -> str:
    """Render a table of tests for each slow file. `unknown` are files that were not searched for
    the defects that act in them; `unrun` are files that were not run with all these defects."""
    parts = []
    for file, of_file in itertools.groupby(tests, key=lambda one: find_file(one.name)):
        held = list(of_file)
        nothing = "not known" if file in unknown or file in unrun else "none"
        rows = [
            f"| {escape(one.name.partition('::')[2])} | {one.cases} | {one.seconds:.1f} "
            f"| {', '.join(sorted(one.found)) or nothing} | {', '.join(sorted(one.alone))} "
            f"| {escape(read_purpose(one.name))} |"
            for one in held
        ]
        state = ", where defects act is not known" if file in unknown else ""
        parts += [
            f"### {show(file)}, {sum(one.seconds for one in held):.0f} s{state}",
            read_purpose(file),
            "",
            "| test | cases | s | finds | alone | is for |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    return "\n".join(parts).rstrip()


def render_mutants(book: Book) -> str:
    run = [mutant for mutant in list_mutants(MODULES) if (mutant.key, QUICK) in book.rows]
    rows, by_quick, survived = [], 0, []
    for mutant in run:
        finds, others, quick = list_cells(book, mutant.key)
        if quick is not None:
            by_quick += 1
        elif finds:
            rest = f"; not {', '.join(map(show, others))}" if others else ""
            rows.append(f"| {escape(mutant.key)} | {', '.join(map(show, finds))}{rest} |")
        elif others:
            survived.append(f"- {escape(mutant.key)} ({', '.join(map(show, others))})")
    return "\n".join(
        [
            f"Of {by_quick + len(rows) + len(survived)} a quick test of the room finds {by_quick}, "
            f"slow ones alone {len(rows)}, none {len(survived)}.",
            "",
            "| mutant that only slow tests find | files that find it |",
            "|---|---|",
            *rows,
            "",
            "Found neither there nor by these files; some may be equivalent:",
            "",
            *survived,
        ]
    )


def escape(text: str) -> str:
    return text.replace("|", "\\|")


def render_page(
    book: Book, acting: dict[str, set[str]], costs: dict[str, float], note: str = ""
) -> str:
    tests = list_tests(book, costs, list(PLACES))
    unknown = [file for file in list_slow() if (CONTROL, file) not in book.rows]
    foreign = list(filter(is_foreign, list_slow()))
    others = [file for file in unknown if file not in foreign]
    rows = [(name, file) for name, files in acting.items() for file in files]
    unrun = {file for name, file in rows if (name, file) not in book.rows}
    left = f" In which of {', '.join(map(show, others))} a defect acts is not known yet."
    return f"""# Defects that the slow tests of the runtime find

Made by `python -m benchmarks.suite.defects COSTS --mutants COUNT --write`. Seconds are of
processor time, with all that a test starts, by `python -m benchmarks.suite.processor`; the ranks
that several tests look at are with the first of them. That a test finds none of these defects is no
reason to delete it: they are those that the equality machine once found, and most tests here are
for others.{note and " "}{note}

## Known defects, put back
A defect acts in a file where the patched code does otherwise than the code that is there; only
those were run. {" and ".join(OWN)} change the equality machine's own model, so that no other test
can find them. No process of {", ".join(map(show, foreign))} imports the
runtime.{left * bool(others)} A file that takes over {LARGE_S:.0f} s ended with its first failure.

{render_defects(book, acting)}

## Slow tests
{render_tests(tests, others, unrun)}

## Mutants
{render_mutants(book)}
"""


def check_proof(book: Book) -> None:
    name, test = PROOF
    row = book.rows.get((name, find_file(test)))
    if row is not None and not any(failed.startswith(test) for failed in row.failed):
        raise SystemExit(f"{test} did not find {name}: the defects do not reach forked ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("costs", type=Path, help="of benchmarks.suite.processor --keep")
    parser.add_argument("--only", nargs="*", default=list(PLACES), choices=PLACES, metavar="DEFECT")
    parser.add_argument("--files", nargs="*", default=[], help="starts of slow files; of all")
    parser.add_argument("--mutants", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modules", nargs="*", default=MODULES, help="that mutants are drawn from")
    parser.add_argument(
        "--keep", type=Path, default=ROOT / "build/defects", help="resume from here"
    )
    parser.add_argument("--kept", action="store_true", help="run nothing: the page of what is kept")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--note", default="", help="what the page says of this pass")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    costs = dict(read_rows(options.costs.read_text()))
    book, probed = Book(options.keep / "results.jsonl"), options.keep / PROBED
    mutants = draw_mutants(options.mutants, options.seed, tuple(options.modules))
    if not options.kept:
        with tempfile.TemporaryDirectory() as name:
            runs = Runs(Copy(Path(name)), sum_files(list(costs.items())), book)
            run_all(runs, options, mutants, probed)
            runs.place.end()
    page = render_page(book, read_acting(probed), costs, options.note)
    print(page)
    if options.write:
        RESULT.write_text(page.rstrip() + "\n")


def run_all(
    runs: Runs, options: argparse.Namespace, mutants: Sequence[Mutant], probed: Path
) -> None:
    files = [file for file in list_slow() if file.startswith(tuple(options.files or ROOMS))]
    files = sorted(files, key=lambda file: runs.costs.get(file, 0.0))
    if options.only:
        runs.run_control(files, probed)
    acting = read_acting(probed)
    for name in options.only:
        runs.run_defect(name, [file for file in files if file in acting[name]])
        check_proof(runs.book)
        if runs.book.find(name, QUICK) is None:
            quick = runs.run_quick(name, VARUNA, runs.end_with(name), list_near(PLACES[name]))
            print(f"{name}: found by {quick.failed[:1] or 'no quick test'}", flush=True)
    for mutant in mutants:
        runs.run_mutant(mutant, [file for file in files if not is_foreign(file)])


if __name__ == "__main__":
    main()

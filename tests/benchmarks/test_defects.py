"""The record of which defects slow tests find: where a defect acts, who finds it alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.suite import defects, put_back
from benchmarks.suite.defects import Book, list_cells, list_tests, read_purpose
from tests.conftest import LONG
from tests.varuna_core.equality.defects import DEFECTS
from varuna_core.runtime.optim.updates import Updates
from varuna_core.runtime.split import random_streams

FIRST, SECOND = "tests/varuna_core/test_varuna.py", "tests/varuna_core/test_varuna_docs.py"


@pytest.fixture
def book(tmp_path: Path) -> Book:
    book = Book(tmp_path / "results.jsonl")
    book.add("none", FIRST, {f"{FIRST}::broken": "failed"})
    book.add("one_optimizer", FIRST, {f"{FIRST}::a[x]": "failed", f"{FIRST}::broken": "failed"})
    book.add("one_optimizer", SECOND, {f"{SECOND}::b": "passed"})
    book.add("time_limits", FIRST, {f"{FIRST}::a[y]": "failed", f"{FIRST}::a[z]": "left"})
    book.add("time_limits", defects.QUICK, {"tests/varuna_core/runtime/q.py::q": "failed"})
    return book


def test_every_defect_is_put_back_or_is_the_machines_own() -> None:
    assert defects.PLACES.keys() | set(defects.OWN) == DEFECTS.keys()
    assert defects.LONG == LONG


def test_a_test_finds_alone_what_no_other_finds(book: Book) -> None:
    costs = {f"{FIRST}::a[x]": 2.0, f"{FIRST}::a[y]": 1.0, f"{FIRST}::broken": 1.0}
    a, broken = list_tests(book, costs, list(defects.PLACES))
    assert (a.seconds, a.cases) == (3.0, 2)
    assert a.found == {"one_optimizer", "time_limits"} and a.alone == {"one_optimizer"}
    assert not broken.found, "it fails without a defect"
    assert list_cells(book, "time_limits")[2] == "tests/varuna_core/runtime/q.py::q"


def test_what_was_found_is_kept_as_long_as_the_code_is_the_same(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Book(book.path)
    found = again.find("time_limits", FIRST)
    assert found is not None and (found.failed, found.left) == ([f"{FIRST}::a[y]"], 1)
    monkeypatch.setattr(defects, "hash_state", lambda files: "other")
    assert again.find("time_limits", FIRST) is None


def test_a_probe_notes_the_file_of_a_test_in_which_a_defect_acts(tmp_path: Path) -> None:
    path = tmp_path / "probed.jsonl"
    put_back.install_probes(path)
    try:
        updates = SimpleNamespace(needs_scale=False)
        Updates.attach(updates, [object()], None)  # type: ignore[arg-type]
        assert not path.exists(), "one optimizer is the last one"
        Updates.attach(updates, [object(), object()], None)  # type: ignore[arg-type]
        with random_streams.kept_random_state(random_streams.CPU):
            random_streams.seed_all(1)
            random_streams.seed_all(2)  # nothing was drawn
            random_streams.random.random()
            random_streams.seed_all(1)
    finally:
        put_back.remove_probes()
    file = "tests/benchmarks/test_defects.py"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [["one_optimizer", file], ["foreign_streams", file]]
    assert Updates.attach.__code__.co_filename.endswith("updates.py")


def test_a_test_is_for_what_its_docstring_says() -> None:
    assert read_purpose(f"{FIRST}::test_ranks_agree_to_the_bit").startswith("On the loss")
    assert read_purpose(f"{FIRST}::test_running_ahead_changes_no_bit") == ""
    assert read_purpose(FIRST).startswith("A model in any")


def test_the_page_tells_what_was_not_run_from_what_finds_nothing(book: Book) -> None:
    acting = {name: set[str]() for name in defects.PLACES} | {"one_optimizer": {FIRST, SECOND}}
    acting["rounded_weights"] = {FIRST}
    page = defects.render_page(book, acting, {f"{FIRST}::a[x]": 2.0, f"{SECOND}::b": 1.0})
    first, second = "`test_varuna.py`", "`test_varuna_docs.py`"
    assert f"| one_optimizer | finds: {first}; does not: {second} | not run |" in page
    assert f"| rounded_weights | not run: {first} | not run |" in page
    assert "| attributes | acts in none that is known | not run |" in page
    assert "| a | 1 | 2.0 | one_optimizer, time_limits | one_optimizer |  |" in page


def test_a_mutant_survives_only_what_it_was_held_against(book: Book) -> None:
    first, second, third, fourth = defects.list_mutants(defects.MODULES)[:4]
    for mutant in (first, second, third):
        book.add(mutant.key, defects.QUICK, {"q.py::q": "passed"})
    book.add(first.key, FIRST, {f"{FIRST}::a": "passed"})
    book.add(second.key, FIRST, {f"{FIRST}::a": "failed"})
    book.add(fourth.key, defects.QUICK, {"q.py::q": "failed"})
    page = defects.render_mutants(book)
    assert page.startswith("Of 3 a quick test of the room finds 1, slow ones alone 1, none 1.")
    assert f"- {first.key} (`test_varuna.py`)".replace("|", "\\|") in page
    assert third.key not in page, "no slow file was run with it"

"""The page of long tests is made of what pytest prints, and each has a reason."""

import pytest

from benchmarks.suite.durations import list_long, render
from benchmarks.suite.processor import compare
from benchmarks.suite.processor import render as render_times

LOG = """
============================= slowest 15 durations =============================
61.50s setup    tests/varuna_core/test_varuna.py::test_any[2x1 a|b]
59.99s call     tests/cluster/test_jobs.py::test_short
240.00s call     tests/cluster/test_jobs.py::test_it
=========== 1 failed, 7813 passed, 162 skipped in 4220.07s (1:10:20) ===========
The failed tests once more
============================== 1 failed in 2.69s ===============================
"""


def test_tests_over_a_minute_are_listed_with_their_reasons() -> None:
    assert [(one.test, one.seconds) for one in list_long(LOG)] == [
        ("tests/cluster/test_jobs.py::test_it", 240.0),
        ("tests/varuna_core/test_varuna.py::test_any[2x1 a|b]", 61.5),
    ]
    page = render(LOG)
    assert "7813 passed, 162 skipped in 4220.07s (1:10:20)" in page and "2.69s" not in page
    assert "| `cluster/test_jobs.py::test_it` (call) | 240 | real jobs on the lab" in page
    assert "(setup) | 62 | all cases of a world" in page and "test_short" not in page


@pytest.mark.parametrize("log", ["", "no end"])
def test_a_log_without_an_end_is_said(log: str) -> None:
    assert "it did not end" in render(log)


def test_one_without_a_reason_is_seen() -> None:
    assert "**?**" in render("61.0s call  tests/new/test_new.py::test_it\n")


def test_files_and_tests_stand_by_their_processor_time() -> None:
    page = render_times([("a::one", 1.0), ("b::one", 2.5), ("a::two", 2.0), ("collection", 0.1)])
    assert page.splitlines()[0] == "4 tests and collections: 6 s of processor"
    names = [line.split()[1] for line in page.splitlines()[1:] if line]
    assert names == ["a", "b", "collection", "b::one", "a::two", "a::one", "collection"]


def test_rooms_are_compared_by_the_files_that_were_measured_twice() -> None:
    before = {"tests/a/test_x.py": 4.0, "tests/a/test_y.py": 3.0, "tests/b/test_z.py": 2.0}
    page = compare(before, {"tests/a/test_x.py": 1.0, "tests/b/test_z.py": 2.0, "collection": 9.0})
    assert page.splitlines()[-3:] == [
        "| tests/a | 4 | 1 |", "| tests/b | 2 | 2 |", "| together | 6 | 3 |",
    ]  # fmt: skip

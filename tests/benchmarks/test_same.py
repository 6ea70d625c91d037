"""The comparison of two commits: what differs, where, and which differences are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.same.__main__ import ALLOWED, render_page
from benchmarks.same.difference import (
    Allowance,
    Difference,
    compare,
    compare_lines,
    compare_values,
    read_allowances,
    sort_out,
)


@pytest.mark.parametrize(
    ("before", "after", "places"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ["a.b[1]"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a"]),
        ({"a": 1}, {"b": 1}, ["a", "b"]),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": None}, {}, ["a"]),
        ([{"a": 0.5}], [{"a": 0.25}], ["[0].a"]),
    ],
)
def test_json_values_differ_by_path(before: Any, after: Any, places: list[str]) -> None:
    assert [place for place, _, _ in compare_values(before, after)] == places


@pytest.mark.parametrize("number", [1, 5000])
def test_texts_differ_by_line(number: int) -> None:
    same = "x\n" * number
    assert compare_lines(same, same) == []
    assert compare_lines(f"{same}one\n", f"{same}two\n") == ["-one", "+two"]


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [({}, {"a": 1}, "came"), ({"a": 1}, {}, "went"), ({"a": 1}, {"a": 2}, "changed")],
)
def test_a_path_comes_goes_or_changes(before: Any, after: Any, kind: str) -> None:
    assert [one.kind for one in compare({"x": before}, {"x": after})] == [kind]


def test_an_output_that_one_commit_lacks_is_a_difference() -> None:
    assert [str(one) for one in compare({"a": "", "b": ""}, {"b": ""})] == ["only before:  -> "]


def test_only_what_is_allowed_passes() -> None:
    found = compare(
        {"status/a": {"verdict": {"facts": [1], "reason": "x"}}, "batch.sh": "one\n"},
        {"status/a": {"verdict": {"facts": [2], "reason": "y"}}, "batch.sh": "two\n"},
    )
    step = Allowance(step="words", why="", outputs=("status/*",), places=("verdict.facts[*]",))
    refused, allowed = sort_out(found, [step])
    assert [one.place for one in refused] == ["-one", "+two", "verdict.reason"]
    assert allowed == {"words": 1}


def test_the_page_lists_paths_by_document_and_counts_lines() -> None:
    found = compare(
        {"status/a": {"jobs": [{"id": 1}, {"id": 2}]}, "submit/a/batch.sh": "one\n"},
        {"status/a": {"jobs": [{"id": 3}, {"id": 4}]}, "submit/a/batch.sh": "two\n"},
    )
    page = render_page("x and y", "x", 2, found)
    assert "| status | - | - | `jobs[*].id` |" in page and "| submit/*/batch.sh | 1 | 1 |" in page


def test_a_bracket_in_a_pattern_is_a_bracket() -> None:
    step = Allowance(step="", why="", outputs=("*",), places=("jobs[0].id",))
    assert step.allows(Difference(name="a", place="jobs[0].id"))
    assert not step.allows(Difference(name="a", place="jobs0.id"))


def test_the_stored_allowances_say_why() -> None:
    base, allowances = read_allowances(ALLOWED)
    assert base and all(one.step and one.why and one.places for one in allowances)

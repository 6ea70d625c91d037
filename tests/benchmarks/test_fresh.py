"""The table of fresh machines; the machines themselves take gigabytes and are made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.suite import fresh


def test_a_row_takes_the_place_of_the_one_before_it() -> None:
    first, second = fresh.TRIALS[:2]
    page = fresh.render_page("", second, f"| {second.name} | 3.13 | | done | 4 |\n")
    page = fresh.render_page(page, first, f"| {first.name} | 3.11 | | exit 2 | 4 |\n")
    page = fresh.render_page(page, first, f"| {first.name} | 3.11 | | done | 4 |\n")
    rows = [line for line in page.splitlines() if line.startswith("| Debian")]
    assert rows == [f"| {t.name} | {v} | | done | 4 |" for t, v in ((first, 3.11), (second, 3.13))]


def test_a_machine_that_cannot_be_had_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    bench = fresh.Bench(work=tmp_path, pythons=None, carry=(), mirror="")
    row = fresh.try_machine(bench, fresh.TRIALS[0])
    assert row.endswith("not tried: needs root and debootstrap | |\n")


def test_the_reason_is_the_first_error_with_words_of_its_own() -> None:
    said = (
        "error: subprocess-exited-with-error\n  error: could not create 'x': no\nmake: *** Error 1"
    )
    assert fresh.find_reason(said) == "error: could not create 'x': no"

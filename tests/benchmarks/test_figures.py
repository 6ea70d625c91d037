"""What benchmarks/README.md says was measured: each number is in the result file of its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.catalogue import BENCHMARKS
from benchmarks.drawing import draw_bounds
from benchmarks.figures import Figure, find_figures, read_tables
from tests import ROOT

EXPERIMENTS = ("chaos", "walkthrough")
"""They need the Slurm lab and print no figures with bounds: run by hand."""
FOLDER = ROOT / "benchmarks"


def list_rows() -> list[tuple[str, str, str, str, str]]:
    section = (FOLDER / "README.md").read_text().split("\n## ")[0]
    ((_, rows),) = read_tables(section)
    return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]


@pytest.mark.parametrize("row", list_rows(), ids=lambda row: row[0])
def test_each_number_of_the_table_is_in_a_result_file(
    row: tuple[str, str, str, str, str],
) -> None:
    what, measured, spread, bound, made_by = row
    (link,) = re.findall(r"\((results/[\w.-]+\.md)\)", made_by)
    text = (FOLDER / link).read_text()
    value = float(measured.split(",")[0])
    figures = [
        one for one in find_figures(text) if one.value == value and one.bound == float(bound)
    ]
    assert figures, f"{what}: no figure {value:g} with bound {bound} in {link}"
    assert spread in [one.shown_spread for one in figures], what
    assert ("missed" in measured) != any(one.is_met for one in figures), what


NEEDS_AN_ARGUMENT = {"planner/estimates", "planner/sizes", "suite/fresh", "suite/durations"}
NEEDS_AN_ARGUMENT |= {"launch_scripts/tree", "commands/screens", "suite/processor", "suite/defects"}
"""Other people's measurements, scripts and programs, which only their owner can name; roots of
Debian; a log."""


def test_every_benchmark_that_writes_a_result_is_run_by_make_bench() -> None:
    named = NEEDS_AN_ARGUMENT | {one.module.replace(".", "/") for one in BENCHMARKS}
    for path in (ROOT / "benchmarks").glob("*/**/*.py"):
        module = path.relative_to(ROOT / "benchmarks").with_suffix("")
        module = module.parent if module.name == "__main__" else module
        if '"--write"' in path.read_text() and module.parts[0] not in EXPERIMENTS:
            assert str(module) in named, path


def test_every_benchmark_is_a_module_that_can_be_run() -> None:
    for one in BENCHMARKS:
        path = ROOT / "benchmarks" / one.module.replace(".", "/")
        is_package = (path / "__main__.py").is_file()
        assert is_package or "__main__" in path.with_suffix(".py").read_text(), one


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.md")), ids=str)
def test_results_name_neither_paths_nor_hosts(path: Path) -> None:
    assert not re.search(r"/(?:home|tmp|work|root|Users)/", path.read_text())


TABLES = """
| what | bound | smallest | median | largest |
|---|---|---|---|---|
| a | 1.5 | 1.1 | 1.2 | 1,301.5 |
| b | at least 2 | 1 | 1.9 | 3 |

| way | s | against it | bound | peak MB | bound |
|---|---|---|---|---|---|
| every event | 20.6 | 0.48 | 6 | 231 | 200 |

| what | bound | ours | theirs |
|---|---|---|---|
| index | 0.2 | 0.043 | 0.02 |
| without |  | 0.04 |  |

| bound | limit | median | |
|---|---|---|---|
| m=8: ours | at most 1.010 | 0.987 | met |
"""


def test_figures_are_found_in_the_tables_that_benchmarks_print() -> None:
    found = [
        (one.what, one.value, one.bound, one.is_met, one.spread) for one in find_figures(TABLES)
    ]
    assert found == [
        ("a", 1.2, 1.5, True, (1.1, 1301.5)),
        ("b", 1.9, 2.0, False, (1.0, 3.0)),
        ("every event", 0.48, 6.0, True, None),
        ("every event", 231.0, 200.0, False, None),
        ("index", 0.043, 0.2, True, None),
        ("m=8: ours", 0.987, 1.01, True, None),
    ]


@given(st.text(alphabet="|-: ab1.\n", max_size=80))
def test_any_text_has_tables_or_none(text: str) -> None:
    for head, rows in read_tables(text):
        assert all(len(row) >= len(head) for row in rows)
    list(find_figures(text))


def test_plots_say_what_was_missed_and_escape_names() -> None:
    figures = [
        Figure(what="a < b", value=2.0, bound=1.0, spread=(0.5, 3.0)),
        Figure(what="fast", value=2.0, bound=1.0, at_least=True),
    ]
    drawn = draw_bounds({"Title": figures})
    assert "a &lt; b" in drawn and drawn.count("<rect") == 3
    assert figures[0].reach(2.0) == 2.0 and figures[1].reach(2.0) == 0.5

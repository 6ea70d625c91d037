"""Causes of ended jobs: the short form of the table of staged ends, and ten real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ends.__main__ import hear, list_misses
from benchmarks.ends.errors import ERRORS
from benchmarks.ends.rows import Row
from benchmarks.ends.table import list_rows

FEW = ("CUDA OOM", "import", "SystemExit 7")
"""Errors whose rows are staged here; the benchmark has all."""
RUN = (
    "local: key raised",
    "local: import raised",
    "local: SystemExit 7 raised",
    "local: interrupt raised",
    "local: segfault raised",
    "local: no space caught, ends well",
    "local: import caught on stdout, exit 3",
    "local: CUDA OOM caught, another raised",
    "local: key caught, os._exit(5)",
    "local: permission caught, another raised",
)


ROWS = list_rows([error for error in ERRORS if error.name in FEW])
STAGED = [row for row in ROWS if not row.program]


def test_the_table_names_every_end_once() -> None:
    titles = [row.title for row in ROWS]
    assert len(titles) == len(set(titles))
    assert len(STAGED) >= 120 and set(RUN) <= set(titles)


@pytest.mark.parametrize("row", STAGED, ids=lambda row: row.title)
def test_a_staged_end_is_stated_as_it_was(row: Row, tmp_path: Path) -> None:
    assert list(list_misses(row, hear(row, tmp_path))) == []


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.title in RUN], ids=lambda row: row.title
)
def test_a_real_end_is_stated_as_it_was(row: Row, tmp_path: Path) -> None:
    assert list(list_misses(row, hear(row, tmp_path))) == []
